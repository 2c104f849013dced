import dataclasses
import errno
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.core.dist_checkpointing import storage, tensor_file
from megatron.core.dist_checkpointing.folders import TRACKER, find, iterations
from megatron.core.dist_checkpointing.manifest import MANIFEST
from megatron.core.dist_checkpointing.sharded_tensor import ShardedTensor
from megatron.core.dist_checkpointing.store import load, newest_whole, read_state, save, verify
from megatron.core.dist_checkpointing.whole import WholeReader
from tests.pool import groups
from tests.unit.dist_checkpointing.pieces import empty_like, same, shard, whole

STATE = {"iteration": 100, "seeds": [1, 2], "note": 'a "crc32": line', "lr": 0.1, "none": None}


@pytest.fixture
def world():
    return groups().world


def sample():
    torch.manual_seed(0)
    nan = torch.tensor([float("nan"), -0.0, float("inf")])
    full = torch.randn(6, 4)
    return [
        whole("embedding.weight", torch.randn(8, 4)),
        whole("bf16", torch.randn(5, 3).bfloat16()),
        whole("count", torch.arange(7)),
        whole("scalar", torch.tensor(2.5)),
        whole("odd", nan),
        whole("mask", torch.tensor([True, False, True])),
        whole("empty", torch.empty(0, 4)),
        shard("split", full, 0, 0, 2),
        shard("split", full, 0, 1, 2),
    ]


def flip(path, position=-1):
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


def tree(root):
    return {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_round_trip_is_bit_for_bit(tmp_path, world):
    pieces = sample()
    path = save(tmp_path / "a" / "b", 100, pieces, STATE, group=world, keep=None)
    assert path == find(tmp_path / "a" / "b", None)
    into = empty_like(pieces)
    assert load(path, into, group=world) == STATE == read_state(path)
    assert all(same(a.data, b.data) for a, b in zip(pieces, into))
    verify(path)


def test_a_folder_with_the_name_of_another_iteration_is_refused(tmp_path, world):
    for iteration in (2, 4):
        save(tmp_path, iteration, [whole("w", torch.zeros(2))], STATE, group=world, keep=None)
    (tmp_path / "iter_0000004").rename(tmp_path / "iter_0000006")
    found = find(tmp_path, 6)
    for read in (read_state, lambda path: load(path, [], group=world), verify):
        with pytest.raises(CheckpointError, match=r"is of iteration 4: the folder was renamed; give its name back"):
            read(found)
    assert newest_whole(tmp_path, before=None, group=world) == 2
    renamed = found.rename(tmp_path / "best")  # a name that promises no iteration
    assert read_state(renamed) == STATE


def test_a_checkpoint_that_does_not_say_its_iteration_loads(tmp_path, world):
    path = save(tmp_path, 4, [], STATE, group=world, keep=None)
    raw = (path / MANIFEST).read_bytes()
    body = raw.rpartition(b',\n"crc32"')[0].replace(b'"iteration": 4,\n', b"", 1)
    (path / MANIFEST).write_bytes(body + b',\n"crc32": "%08x"}\n' % zlib.crc32(body))
    assert read_state(path) == STATE


def test_nothing_but_state_is_a_checkpoint_too(tmp_path, world):
    path = save(tmp_path, 1, [], {}, group=world, keep=None)
    assert load(path, [], group=world) == {}
    assert [entry.name for entry in path.iterdir()] == [MANIFEST]


def test_parameters_and_strided_destinations_are_filled_in_place(tmp_path, world):
    saved = torch.randn(4, 6)
    path = save(tmp_path, 1, [whole("w", saved)], {}, group=world, keep=None)
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    base = torch.zeros(6, 4)
    load(path, [whole("w", parameter)], group=world)
    load(path, [whole("w", base.t())], group=world)
    assert same(parameter.data, saved) and same(base, saved.t().contiguous())


def test_a_part_of_the_tensors_can_be_loaded(tmp_path, world):
    pieces = sample()
    path = save(tmp_path, 1, pieces, {}, group=world, keep=None)
    part = ShardedTensor("split", torch.zeros(3, 2), (6, 4), (2, 1), True)
    load(path, [part], group=world)
    full = torch.cat([pieces[-2].data, pieces[-1].data])
    assert same(part.data, full[2:5, 1:3])


def test_a_rank_begins_a_new_file_when_one_is_full(tmp_path, world, monkeypatch):
    monkeypatch.setattr(storage, "FILE_BYTES", 128)
    pieces = [whole(f"t{i}", torch.randn(5, 4)) for i in range(5)]  # 80 bytes each
    path = save(tmp_path, 1, pieces, {}, group=world, keep=None)
    assert len(list(path.glob("__0_*.safetensors"))) == 5
    into = empty_like(pieces)
    load(path, into, group=world)
    assert all(same(a.data, b.data) for a, b in zip(pieces, into))


def test_files_are_safetensors_and_json_and_loading_never_unpickles(tmp_path, world, monkeypatch):
    pieces = sample()
    path = save(tmp_path, 1, pieces, STATE, group=world, keep=None)
    files = sorted(path.iterdir())
    assert [file.name for file in files] == ["__0_0.safetensors", MANIFEST]
    json.loads((path / MANIFEST).read_text())
    with safe_open(str(files[0]), framework="pt") as file:
        assert "embedding.weight@0,0" in file.keys() and "split@3,0" in file.keys()  # noqa: SIM118
    for file in files:
        with pytest.raises(pickle.UnpicklingError):
            pickle.loads(file.read_bytes())

    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    into = empty_like(pieces)
    load(path, into, group=world)
    verify(path)
    assert all(same(a.data, b.data) for a, b in zip(pieces, into))


def damage_truncate(path):
    os.truncate(path / "__0_0.safetensors", 100)


def damage_flip_data(path):
    flip(path / "__0_0.safetensors", -3)


def damage_flip_header(path):
    position = (path / "__0_0.safetensors").read_bytes().index(b"bf16@")
    flip(path / "__0_0.safetensors", position)


def damage_header_length(path):
    flip(path / "__0_0.safetensors", 3)


def damage_remove(path):
    (path / "__0_0.safetensors").unlink()


def damage_manifest_missing(path):
    (path / MANIFEST).unlink()


def damage_manifest_truncated(path):
    os.truncate(path / MANIFEST, 200)


def damage_manifest_digit(path):
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace('"seeds": [1', '"seeds": [3'))


DAMAGES = {
    damage_truncate: r"__0_0\.safetensors is damaged: it has 100 bytes, \d+ were written",
    damage_flip_data: r"__0_0\.safetensors is damaged: tensor \S+ has checksum \w+ in its block 0",
    damage_flip_header: r"__0_0\.safetensors is damaged: it holds no tensor bf16@0,0",
    damage_header_length: r"__0_0\.safetensors is damaged or no safetensors file",
    damage_remove: r"__0_0\.safetensors is missing",
    damage_manifest_missing: r"metadata\.json is missing",
    damage_manifest_truncated: r"metadata\.json is damaged: it is not JSON",
    damage_manifest_digit: r"metadata\.json is damaged: its content does not have the checksum",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_damage_is_named_and_an_earlier_whole_checkpoint_too(tmp_path, world, damage):
    pieces = sample()
    for iteration in (60, 80, 90, 100):
        save(tmp_path, iteration, pieces, STATE, group=world, keep=None)
    flip(tmp_path / "iter_0000090" / "__0_0.safetensors")
    path = tmp_path / "iter_0000100"
    damage(path)
    with pytest.raises(CheckpointError, match=DAMAGES[damage] + ".*; --ckpt-step 80 loads") as caught:
        load(path, empty_like(pieces), group=world)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=DAMAGES[damage]):
        verify(path)
    assert newest_whole(tmp_path, before=None, group=world) == 80
    assert newest_whole(tmp_path, before=80, group=world) == 60
    assert newest_whole(tmp_path, before=60, group=world) is None
    load(tmp_path / "iter_0000080", empty_like(pieces), group=world)


def test_a_state_that_cannot_be_read_names_an_earlier_complete_checkpoint(tmp_path, world):
    for iteration in (60, 80, 90, 100):
        save(tmp_path, iteration, sample(), STATE, group=world, keep=None)
    damage_truncate(tmp_path / "iter_0000090")
    damage_manifest_digit(tmp_path / "iter_0000100")
    with pytest.raises(CheckpointError, match=r"iter_0000100/metadata\.json is damaged.*; try --ckpt-step 80"):
        read_state(tmp_path / "iter_0000100")
    damage_manifest_missing(tmp_path / "iter_0000060")
    with pytest.raises(CheckpointError, match="no earlier checkpoint is complete"):
        read_state(tmp_path / "iter_0000060")


def test_sizes_are_checked_even_of_files_that_are_not_read(tmp_path, world, monkeypatch):
    monkeypatch.setattr(storage, "FILE_BYTES", 1)
    path = save(tmp_path, 1, [whole("a", torch.ones(4)), whole("b", torch.ones(4))], {}, group=world, keep=None)
    os.truncate(path / "__0_1.safetensors", 10)
    with pytest.raises(CheckpointError, match=r"__0_1.*10 bytes.*no earlier checkpoint in .* is whole"):
        load(path, [whole("a", torch.zeros(4))], group=world)


@pytest.mark.parametrize("content", ['{"sharded_backend": "torch_dist"}', "[]"])
def test_another_format_says_how_to_convert_it(tmp_path, world, content):
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / "iter_0000005" / MANIFEST).write_text(content)
    with pytest.raises(CheckpointError, match=r"not of this program's format.*tools/checkpoint/convert\.py"):
        load(tmp_path / "iter_0000005", [], group=world)


def test_a_newer_format_is_refused(tmp_path, world, monkeypatch):
    monkeypatch.setattr("megatron.core.dist_checkpointing.manifest.VERSION", 3)
    path = save(tmp_path, 1, [], {}, group=world, keep=None)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="version 3, this program reads 'megatron-patched' version 1 and 2"):
        load(path, [], group=world)


def test_an_older_format_loads(tmp_path, world, monkeypatch):
    monkeypatch.setattr("megatron.core.dist_checkpointing.manifest.VERSION", 1)
    pieces = sample()
    path = save(tmp_path, 1, pieces, STATE, group=world, keep=None)
    monkeypatch.undo()
    into = empty_like(pieces)
    assert load(path, into, group=world) == STATE and all(same(a.data, b.data) for a, b in zip(pieces, into))


def test_a_rounded_tensor_takes_no_room_and_is_read_from_its_origin(tmp_path, world):
    master = torch.randn(6, 4)
    halves = [shard("master", master, 0, rank, 2) for rank in range(2)]
    weight = dataclasses.replace(whole("weight", master.bfloat16()), rounded_from="master")
    path = save(tmp_path, 1, [weight, *halves], {}, group=world, keep=None)
    with safe_open(path / "__0_0.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["master@0,0", "master@3,0"]
    verify(path)
    into = whole("weight", torch.zeros(6, 4).bfloat16())
    load(path, [into], group=world)
    box = Box((2, 1), (3, 2))
    assert same(into.data, weight.data)
    assert same(WholeReader(path).read("weight", box, torch.bfloat16), weight.data[2:5, 1:3].contiguous())
    with pytest.raises(CheckpointError, match=r"weight is torch\.bfloat16 in the checkpoint and torch\.float32 here"):
        load(path, [whole("weight", torch.zeros(6, 4))], group=world)
    with pytest.raises(CheckpointError, match=r"weight has pieces of torch\.bfloat16 \[6, 4\] rounded from master and"):
        save(tmp_path, 2, [weight, whole("weight", master.bfloat16()), *halves], {}, group=world, keep=None)
    flip(path / "__0_0.safetensors", -3)
    with pytest.raises(CheckpointError, match="tensor master@3,0 has checksum"):
        load(path, [into], group=world)


def test_a_tensor_that_does_not_fit_is_named(tmp_path, world):
    path = save(tmp_path, 1, [whole("w", torch.zeros(4, 6))], {}, group=world, keep=None)
    for other, message in (
        (whole("v", torch.zeros(4, 6)), r"v is not in the checkpoint, which holds 1 tensors \(w"),
        (whole("w", torch.zeros(4, 8)), r"w is \[4, 6\] in the checkpoint and \[4, 8\] here"),
        (whole("w", torch.zeros(24)), r"w is \[4, 6\] in the checkpoint and \[24\] here"),
        (whole("w", torch.zeros(4, 6).bfloat16()), r"w is torch\.float32 in the checkpoint and torch\.bfloat16 here"),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            load(path, [other], group=world)
        assert "ckpt-step" not in str(caught.value)  # another iteration would not help


def test_pieces_that_do_not_form_the_tensor_are_not_saved(tmp_path, world):
    full = torch.zeros(6, 4)
    cases = (
        ([shard("w", full, 0, 0, 2)], r"w \[6, 4\]: no rank writes elements \[3:6, 0:4\]"),
        ([shard("w", full, 0, 0, 2), shard("w", full, 0, 1, 2, writer=False)], r"no rank writes elements \[3:6"),
        ([whole("w", full), shard("w", full, 1, 0, 2)], r"elements \[0:6, 0:2\] would be written twice"),
        ([whole("w", full), whole("w", torch.zeros(6, 4).half(), False)], "w has pieces of torch.float32"),
        ([whole("w", torch.zeros(2, dtype=torch.complex64))], "w is torch.complex64, which a checkpoint cannot hold"),
    )
    for pieces, message in cases:
        with pytest.raises(CheckpointError, match=message):
            save(tmp_path, 1, pieces, {}, group=world, keep=None)
    assert list(tmp_path.iterdir()) == []


def test_state_that_is_not_json_is_refused(tmp_path, world):
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        save(tmp_path, 1, [], {"rng": torch.zeros(1)}, group=world, keep=None)
    assert list(tmp_path.iterdir()) == []


def test_saving_an_iteration_again_replaces_it_and_keep_deletes_old_ones(tmp_path, world):
    for iteration in (20, 40, 60):
        save(tmp_path, iteration, [whole("w", torch.full((3,), float(iteration)))], {}, group=world, keep=2)
    assert iterations(tmp_path) == [40, 60]
    save(tmp_path, 60, [whole("w", torch.full((3,), 61.0))], {"again": True}, group=world, keep=2)
    into = whole("w", torch.zeros(3))
    assert load(find(tmp_path, None), [into], group=world) == {"again": True}
    assert into.data.tolist() == [61.0] * 3
    assert {entry.name for entry in tmp_path.iterdir()} == {"iter_0000040", "iter_0000060", TRACKER}


@pytest.mark.parametrize("failing", ["tensor", "tracker"])
def test_a_full_disk_leaves_everything_as_it_was(tmp_path, world, monkeypatch, failing):
    save(tmp_path, 80, sample(), STATE, group=world, keep=1)
    before = tree(tmp_path)
    real = open

    def full_disk(path, *args, **kwargs):
        if str(path).endswith(".safetensors" if failing == "tensor" else f"{TRACKER}.tmp"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", full_disk)
    with pytest.raises(CheckpointError, match=r"could not save iteration 100 .* ENOSPC: No space left on device"):
        save(tmp_path, 100, sample(), STATE, group=world, keep=1)
    monkeypatch.undo()
    assert tree(tmp_path) == before
    assert [entry.name for entry in tmp_path.glob(".iter*")] == []


def test_an_interrupt_is_no_checkpoint_error(tmp_path, world, monkeypatch):
    def interrupt(path, sources):
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "write_tensor_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 100, sample(), STATE, group=world, keep=1)
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_fails_the_save(tmp_path, world):
    """A real write error of the kernel: EFBIG in the middle of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match="EFBIG: File too large"):
            save(tmp_path, 100, [whole("w", torch.randn(10000))], {}, group=world, keep=None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_really_full(tmp_path, world):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        save(tmp_path, 80, [whole("w", torch.ones(1000))], {}, group=world, keep=None)
        with pytest.raises(CheckpointError, match="ENOSPC: No space left on device"):
            save(tmp_path, 100, [whole("w", torch.ones(1000000))], {}, group=world, keep=None)
        assert {entry.name for entry in tmp_path.iterdir()} == {"iter_0000080", TRACKER}
        into = whole("w", torch.zeros(1000))
        load(find(tmp_path, None), [into], group=world)
        assert same(into.data, torch.ones(1000))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def save_and_die(root, iteration, value, deadly, world):
    """Save in a process that is killed when it enters its `deadly`-th call that changes the disk for good."""
    calls = 0

    def killing(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for owner, name in ((os, "fsync"), (os, "mkdir"), (os, "rename"), (Path, "rename"), (os, "rmdir"), (os, "unlink")):
        setattr(owner, name, killing(getattr(owner, name)))
    tensor_file._crc = killing(tensor_file._crc)
    save(root, iteration, [whole("w", torch.full((3,), value))], {"value": value}, group=world, keep=2)


@pytest.mark.parametrize("iteration", [100, 80], ids=["new", "replacing"])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path, world, iteration):
    fork = multiprocessing.get_context("fork")
    values, deadly = [], 0
    while True:
        deadly += 1
        root = tmp_path / str(deadly)
        for old in (40, 60, 80):
            save(root, old, [whole("w", torch.full((3,), 1.0))], {"value": 1.0}, group=world, keep=None)
        process = fork.Process(target=save_and_die, args=(root, iteration, 2.0, deadly, world))
        process.start()
        process.join(30)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        newest = find(root, None)
        verify(newest)
        into = whole("w", torch.zeros(3))
        value = load(newest, [into], group=world)["value"]
        assert into.data.tolist() == [value] * 3
        values.append(value)
        save(root, 120, [into], {}, group=world, keep=1)
        assert {entry.name for entry in root.iterdir()} == {"iter_0000120", TRACKER}
    # Killed before the new one has its name: the old one; afterwards the new one; never back.
    assert values == sorted(values) and set(values) == {1.0, 2.0} and len(values) >= 8
