"""A disk that is full when a checkpoint is written ends the run with the reason; what was saved before still loads."""

import shutil
import subprocess

import pytest

from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import MOCK, figures, flags

LIMITED = "tests.e2e.helpers.drivers:cannot_write_large_files"


@pytest.fixture
def small_disk(tmp_path):
    """A file system that holds two checkpoints of about 300 kB, and not three."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=840k", "tmpfs", folder]
    if not shutil.which("mount") or subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def assert_refused(result, save, iteration, reason):
    text = "".join(result.stderr)
    assert result.codes[0] == 2 and set(result.codes) <= {2, -15}, result.text
    assert text.startswith(
        f"error: could not save iteration {iteration} to {save}, earlier checkpoints are untouched: "
    )
    assert reason in text and text.count("\n") == 1 and "Traceback" not in result.text, result.text


STOP = {"--ckpt-failure": "stop"}


def test_full_disk(small_disk, tmp_path):
    save = {"--save": small_disk / "save", "--save-interval": 2, "--log-progress": None, **STOP}
    result = run(flags(MOCK, save), tmp_path / "log")
    assert_refused(result, small_disk / "save", 6, "ENOSPC: No space left on device")
    left = sorted(path.name for path in (small_disk / "save").iterdir())
    files = ["latest_checkpointed_iteration.txt", "lock.json", "progress.txt"]
    assert left == ["heartbeat", "iter_0000002", "iter_0000004", *files]
    # With room for one more it goes on from the last one.
    retry = {**save, "--load": small_disk / "save", "--save-retain": 1, "--train-iters": 10}
    shutil.rmtree(small_disk / "save" / "iter_0000002")
    resumed = run(flags(MOCK, retry), tmp_path / "log2")
    assert resumed.codes == [0], resumed.text
    assert list(figures(resumed.stdout[0])) == [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_one_of_two_ranks_cannot_write(faulty_rank, tmp_path):
    save = {"--save": tmp_path / "save", "--save-interval": 2, "--train-iters": 6, **STOP}
    assert run(flags(MOCK, save, {"--exit-interval": 2}), tmp_path / "log", 2).codes == [0, 0]
    resume = flags(MOCK, save, {"--load": tmp_path / "save"})
    env = {"FAULTY_RANK": faulty_rank, "FAULTY_BYTES": 30_000}
    result = run(resume, tmp_path / "log2", 2, driver=LIMITED, env=env)
    assert_refused(result, tmp_path / "save", 4, f"rank {faulty_rank}: EFBIG: File too large")
    left = sorted(path.name for path in (tmp_path / "save").iterdir())
    assert left == ["heartbeat", "iter_0000002", "latest_checkpointed_iteration.txt", "lock.json"]
    resumed = run(resume, tmp_path / "log3", 2)
    assert resumed.codes == [0, 0] and list(figures(resumed.stdout[0])) == [3, 4, 5, 6], resumed.text


def test_training_goes_on_while_the_disk_is_full(small_disk, tmp_path):
    """And saves once there is room; a run whose last save fails does not look as if it had succeeded."""
    save = {"--save": small_disk / "save", "--save-interval": 2, "--save-retain": 1, "--train-iters": 8}
    assert run(flags(MOCK, save, {"--exit-interval": 2}), tmp_path / "log", 2).codes == [0, 0]
    filler = small_disk / "filler"
    filler.write_bytes(bytes(500_000))
    going_on = flags(MOCK, save, {"--load": small_disk / "save"})
    env = {"FILLER": filler, "FREED_AT": 6}
    full = run(going_on, tmp_path / "log2", 2, driver="tests.e2e.helpers.drivers:frees_the_disk", env=env)
    assert full.codes == [0, 0] and list(figures(full.stdout[0])) == [3, 4, 5, 6, 7, 8], full.text
    said = full.text.count("earlier checkpoints are untouched")
    assert said == 1 and "iteration 4" in full.text and "(--ckpt-failure warn)" in full.text, full.text
    assert sorted(path.name for path in (small_disk / "save").glob("iter_*")) == ["iter_0000008"]

    filler.write_bytes(bytes(500_000))
    last = run([*going_on, "--train-iters", "9", "--override-opt_param-scheduler"], tmp_path / "log3", 2)
    assert last.codes[0] == 2 and "could not save iteration 9" in last.text, last.text


def test_a_first_save_that_fails_ends_the_run(small_disk, tmp_path):
    (small_disk / "filler").write_bytes(bytes(800_000))
    save = {"--save": small_disk / "save", "--save-interval": 2}
    assert_refused(run(flags(MOCK, save), tmp_path / "log"), small_disk / "save", 2, "ENOSPC")
