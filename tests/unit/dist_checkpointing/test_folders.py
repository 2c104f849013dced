import json

import pytest

from megatron.base.errors import CheckpointError, UserError
from megatron.core.dist_checkpointing import manifest
from megatron.core.dist_checkpointing.best import BEST, BestCheckpoint, read_best, write_best
from megatron.core.dist_checkpointing.folders import TRACKER, begin, find, iterations, prune, publish
from megatron.core.dist_checkpointing.lock import LOCK, hold
from megatron.core.dist_checkpointing.manifest import Manifest, read_manifest, write_manifest


def make(root, iteration, note="x"):
    temporary = begin(root, iteration)
    write_manifest(temporary, Manifest(iteration, {}, {}, {"note": note}, "2.0"))
    return publish(root, iteration, temporary)


def test_a_folder_without_checkpoints_holds_none(tmp_path):
    assert find(tmp_path, None) is None
    assert find(tmp_path / "absent", None) is None
    assert iterations(tmp_path / "absent") == []


def classic(folder):
    (folder / "mp_rank_00").mkdir(parents=True)


def torch_dist(folder):
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"x")


@pytest.mark.parametrize("foreign", [classic, torch_dist])
def test_what_nothing_names_is_not_a_fresh_start(tmp_path, foreign):
    foreign(tmp_path / "iter_0000003")
    foreign(tmp_path / "iter_0000012")
    with pytest.raises(CheckpointError, match=f"no {TRACKER} that names it; write 12 into .*--ckpt-step 12"):
        find(tmp_path, None)
    assert find(tmp_path, 12) == tmp_path / "iter_0000012"
    with pytest.raises(CheckpointError, match=r"is a checkpoint itself; give .*--ckpt-step 12"):
        find(tmp_path / "iter_0000012", None)
    foreign(tmp_path / "converted" / "release")
    with pytest.raises(CheckpointError, match=r"write release into that file$"):
        find(tmp_path / "converted", None)


def test_a_checkpoint_of_ours_is_not_a_fresh_start_either(tmp_path):
    path = make(tmp_path, 80)
    with pytest.raises(
        CheckpointError, match=f"is a checkpoint itself; give the folder that holds it, {tmp_path}, with"
    ):
        find(path, None)
    (tmp_path / TRACKER).unlink()
    (path / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds iter_0000080 without its metadata\.json"):
        find(tmp_path, None)


def test_a_folder_of_a_run_that_has_not_saved_yet_is_a_fresh_start(tmp_path):
    (tmp_path / "heartbeat").mkdir()
    (tmp_path / ".iter_0000120.tmp-1a2b3c4d").mkdir()
    (tmp_path / "progress.txt").touch()
    assert find(tmp_path, None) is None


def test_the_tracker_names_the_newest_and_an_iteration_can_be_asked_for(tmp_path):
    make(tmp_path, 80)
    assert make(tmp_path, 100).name == "iter_0000100"
    assert (tmp_path / TRACKER).read_text() == "100\n"
    assert find(tmp_path, None) == tmp_path / "iter_0000100"
    assert find(tmp_path, 80) == tmp_path / "iter_0000080"
    (tmp_path / TRACKER).write_text("80")  # a user may go back by hand
    assert find(tmp_path, None) == tmp_path / "iter_0000080"
    with pytest.raises(CheckpointError, match="no checkpoint of iteration 90; it holds iterations 80, 100"):
        find(tmp_path, 90)


@pytest.mark.parametrize("content", ["latest", "", "10.5", "-3", "\x00\x00"])
def test_a_garbage_tracker_is_refused_with_what_there_is(tmp_path, content):
    make(tmp_path, 80)
    (tmp_path / TRACKER).write_text(content)
    with pytest.raises(CheckpointError, match=f"{TRACKER} holds .* holds iterations 80; .*--ckpt-step"):
        find(tmp_path, None)
    assert find(tmp_path, 80)


def test_a_tracker_that_names_an_absent_folder_is_refused(tmp_path):
    make(tmp_path, 80)
    (tmp_path / TRACKER).write_text("100")
    with pytest.raises(CheckpointError, match=r"names iteration 100, but iter_0000100 is not there.*iterations 80"):
        find(tmp_path, None)


def test_a_lost_tracker_does_not_lose_the_checkpoints(tmp_path):
    make(tmp_path, 80)
    make(tmp_path, 100)
    (tmp_path / TRACKER).unlink()
    assert find(tmp_path, None) == tmp_path / "iter_0000100"


def test_unfinished_and_foreign_folders_are_not_checkpoints(tmp_path):
    make(tmp_path, 80)
    begin(tmp_path, 100)
    (tmp_path / "iter_0000200" / "mp_rank_00").mkdir(parents=True)
    assert iterations(tmp_path) == [80]
    (tmp_path / "iter_0000040").mkdir()
    (tmp_path / "iter_0000040" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')  # of Megatron-LM
    prune(tmp_path, 80, 1)
    assert {entry.name for entry in tmp_path.glob("iter*")} == {"iter_0000040", "iter_0000080", "iter_0000200"}


def test_begin_removes_what_killed_runs_left_and_nothing_else(tmp_path):
    make(tmp_path, 80)
    (tmp_path / ".iter_0000100.tmp-0123abcd").mkdir()
    (tmp_path / ".iter_0000100.tmp-0123abcd" / "part").write_text("x")
    (tmp_path / ".iter_0000080.old-0123abcd").mkdir()
    (tmp_path / ".mine").mkdir()
    (tmp_path / "progress.txt").write_text("x")
    temporary = begin(tmp_path, 120)
    names = {entry.name for entry in tmp_path.iterdir()}
    assert names == {"iter_0000080", TRACKER, ".mine", "progress.txt", temporary.name}


def test_one_moved_aside_still_loads_and_the_next_save_puts_it_back(tmp_path):
    make(tmp_path, 80, "old").rename(tmp_path / ".iter_0000080.old-0123abcd")
    assert iterations(tmp_path) == [80]
    assert find(tmp_path, None) == tmp_path / ".iter_0000080.old-0123abcd"
    begin(tmp_path, 100)
    assert find(tmp_path, None) == tmp_path / "iter_0000080"


def test_a_checkpoint_is_replaced(tmp_path):
    make(tmp_path, 80, "old")
    make(tmp_path, 80, "new")
    assert read_manifest(find(tmp_path, None)).state == {"note": "new"}
    assert {entry.name for entry in tmp_path.iterdir()} == {"iter_0000080", TRACKER}


@pytest.mark.parametrize(
    ("held", "saved", "keep", "left"),
    [
        ([20, 40, 60], 60, 2, [40, 60]),
        ([20, 40, 60], 60, 1, [60]),
        ([20, 40, 60], 60, 9, [20, 40, 60]),
        ([20, 40, 80, 100, 60], 60, 2, [40, 60]),  # 80 and 100 were given up by going back to 40
        ([100, 20], 20, 1, [20]),
    ],
)
def test_prune_keeps_the_newest_of_this_branch(tmp_path, held, saved, keep, left):
    for iteration in held:
        make(tmp_path, iteration)
    prune(tmp_path, saved, keep)
    assert iterations(tmp_path) == left
    assert not list(tmp_path.glob(".iter*"))


def test_prune_keeps_the_best(tmp_path):
    for iteration in (20, 40, 60):
        make(tmp_path, iteration)
    write_best(tmp_path, BestCheckpoint(20, "reward", 0.5))
    prune(tmp_path, 60, 1)
    assert iterations(tmp_path) == [20, 60] and read_best(tmp_path) == BestCheckpoint(20, "reward", 0.5)
    write_best(tmp_path, BestCheckpoint(60, "reward", 0.75))
    prune(tmp_path, 60, 1)
    assert iterations(tmp_path) == [60]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"iteration": "x", "figure": "reward", "value": 1}'])
def test_a_damaged_file_names_no_best_checkpoint(tmp_path, content, caplog):
    (tmp_path / BEST).write_text(content)
    assert read_best(tmp_path) is None and "is damaged" in caplog.text


def test_planted_links_lead_nowhere(tmp_path):
    """Not to another file, and not to another folder, whatever the program does with its own of that name."""
    root, outside = tmp_path / "save", tmp_path / "outside"
    (outside / "iter").mkdir(parents=True)
    secret = outside / "iter" / "file"
    secret.write_text("theirs")
    root.mkdir()
    (root / f".{TRACKER}.tmp").symlink_to(secret)
    (root / TRACKER).symlink_to(secret)
    for name in (".iter_0000005.tmp-1a2b3c4d", "iter_0000010"):
        (root / name).symlink_to(outside / "iter")
    (root / ".iter_0000010.old-1a2b3c4d").symlink_to(outside / "iter")
    make(root, 10)
    make(root, 20)
    prune(root, 20, 1)
    assert secret.read_text() == "theirs" and [path.name for path in outside.rglob("*")] == ["iter", "file"]
    assert find(root, None) == root / "iter_0000020" and not (root / TRACKER).is_symlink()


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / LOCK).symlink_to(tmp_path / "theirs")
    with pytest.raises(UserError, match=r"lock\.json is a symbolic link to .*theirs, which would be overwritten"):
        with hold(tmp_path / "save"):
            pass
    assert (tmp_path / "theirs").read_text() == "theirs"


GOOD = {
    "shape": [2, 3],
    "dtype": "F32",
    "chunks": [{"offset": [0, 0], "shape": [2, 3], "file": "a", "crc32": ["1a2b3c4d"]}],
}


@pytest.mark.parametrize(
    "edit",
    [
        {"tensors": []},
        {"tensors": {"w": [1]}},
        {"tensors": {"w": {**GOOD, "shape": "23"}}},
        {"tensors": {"w": {**GOOD, "shape": [2, -3]}}},
        {"tensors": {"w": {**GOOD, "shape": [2]}}},
        {"tensors": {"w": {**GOOD, "dtype": ["F32"]}}},
        {"tensors": {"w": {**GOOD, "chunks": [{**GOOD["chunks"][0], "offset": [0, 0.5]}]}}},
        {"tensors": {"w": {**GOOD, "chunks": [{**GOOD["chunks"][0], "file": 7}]}}},
        {"tensors": {"w": {**GOOD, "chunks": [{**GOOD["chunks"][0], "crc32": [7]}]}}},
        {"tensors": {"w": GOOD}, "files": {}},
        {"tensors": {"w": {"shape": [2, 3], "dtype": "BF16", "rounded_from": "v"}}},
        {"tensors": {"w": {"shape": [2, 3], "dtype": "BF16", "rounded_from": "w"}}},
        {"tensors": {"w": {"shape": [3, 3], "dtype": "BF16", "rounded_from": "v"}, "v": GOOD}, "files": {"a": 8}},
        {"files": []},
        {"files": {"__0_0.safetensors": "many"}},
        {"iteration": "ten"},
    ],
    ids=str,
)
def test_edited_metadata_with_a_checksum_that_fits(tmp_path, edit):
    path = make(tmp_path, 80) / "metadata.json"
    content = {key: value for key, value in json.loads(path.read_text()).items() if key != "crc32"} | edit
    body = ("{\n" + ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in content.items())).encode()
    path.write_bytes(body + manifest._checksum_line(body))
    with pytest.raises(CheckpointError, match=r"metadata\.json is damaged"):
        read_manifest(path.parent)
