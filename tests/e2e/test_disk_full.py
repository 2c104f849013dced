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


def test_full_disk(small_disk, tmp_path):
    save = {"--save": small_disk / "save", "--save-interval": 2, "--log-progress": None}
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
    save = {"--save": tmp_path / "save", "--save-interval": 2, "--train-iters": 6}
    assert run(flags(MOCK, save, {"--exit-interval": 2}), tmp_path / "log", 2).codes == [0, 0]
    resume = flags(MOCK, save, {"--load": tmp_path / "save"})
    env = {"FAULTY_RANK": faulty_rank, "FAULTY_BYTES": 30_000}
    result = run(resume, tmp_path / "log2", 2, driver=LIMITED, env=env)
    assert_refused(result, tmp_path / "save", 4, f"rank {faulty_rank}: EFBIG: File too large")
    left = sorted(path.name for path in (tmp_path / "save").iterdir())
    assert left == ["heartbeat", "iter_0000002", "latest_checkpointed_iteration.txt", "lock.json"]
    resumed = run(resume, tmp_path / "log3", 2)
    assert resumed.codes == [0, 0] and list(figures(resumed.stdout[0])) == [3, 4, 5, 6], resumed.text
