"""progress.txt: its columns, and throughput over the jobs of a run."""

from datetime import datetime, timedelta

import pytest

from megatron.base.errors import UserError
from megatron.training.logging.progress_log import JobStart, ProgressLog, first_job

NOW = datetime(2026, 1, 2, 3, 4, 5)


def test_columns_and_throughputs(tmp_path, monkeypatch):
    """Two jobs of 4 processes after one of 8: the cumulative rate begins with the first of the two."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    path = tmp_path / "save" / "progress.txt"
    ProgressLog(path, 8).start(0.0, NOW - timedelta(hours=1))
    for started, done in ((NOW, 4e15), (NOW + timedelta(seconds=200), 8e15)):
        job = ProgressLog(path, 4)
        job.start(done - 4e15, started)
        job.saved(10, done, 2_500_000_000, started + timedelta(seconds=100))
    assert path.read_text().splitlines()[1:] == [
        "2026-01-02 03:04:05\tJob ID: 77\t# GPUs: 4\tStarting job",
        "2026-01-02 03:05:45\tJob ID: 77\t# GPUs: 4\tSaved checkpoint\tIteration: 10\tJob throughput: 10.0 TFLOP/s/GPU"
        "\tCumulative throughput: 10.0 TFLOP/s/GPU\tFloating-point operations: 4.00e+15\tTokens (in billions): 2.50",
        "2026-01-02 03:07:25\tJob ID: 77\t# GPUs: 4\tStarting job",
        "2026-01-02 03:09:05\tJob ID: 77\t# GPUs: 4\tSaved checkpoint\tIteration: 10\tJob throughput: 10.0 TFLOP/s/GPU"
        "\tCumulative throughput: 6.7 TFLOP/s/GPU\tFloating-point operations: 8.00e+15\tTokens (in billions): 2.50",
    ]


def test_the_first_job_of_a_size():
    line = "{}\tJob ID: \t# GPUs: {}\t{}"
    saved = (
        "Saved checkpoint\tIteration: 5\tJob throughput: 1\tCumulative throughput: 1\tFloating-point operations: 3e12"
    )
    lines = [
        line.format("2026-01-01 00:00:00", 4, "Starting job"),
        line.format("2026-01-01 01:00:00", 4, saved),
        line.format("2026-01-01 02:00:00", 8, "Starting job"),
        "2026-01-01 02:30:00\t# GPUs: 4\tStarting job",
        line.format("2026-01-01 03:00:00", 4, "Starting job"),
        line.format("2026-01-01 04:00:00", 4, "Starting job"),
        "cut",
    ]
    assert first_job("\n".join(lines), 4) == JobStart(datetime(2026, 1, 1, 3), 3e12)
    assert first_job("\n".join(lines[:2]), 4) == JobStart(datetime(2026, 1, 1), 0.0)
    assert first_job("\n".join(lines), 8) is None is first_job("", 4)


def test_a_link_to_another_file_is_refused(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "progress.txt").symlink_to(tmp_path / "theirs")
    with pytest.raises(UserError, match=r"progress\.txt is a symbolic link to .*theirs"):
        ProgressLog(tmp_path / "progress.txt", 8).start(0.0, NOW)
    assert (tmp_path / "theirs").read_text() == "theirs"
