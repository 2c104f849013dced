"""Saves in the background: what is written is what the tensors were, and a later save waits."""

import threading

import pytest
import torch

from megatron.core.dist_checkpointing import storage
from megatron.core.dist_checkpointing.folders import TRACKER, find
from megatron.core.dist_checkpointing.pending_save import PendingSave
from megatron.core.dist_checkpointing.sharded_tensor import ShardedTensor
from megatron.core.dist_checkpointing.staging import Staging
from megatron.core.dist_checkpointing.store import load, save
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from tests.pool import groups
from tests.unit.dist_checkpointing.pieces import empty_like, same, whole

CPU = torch.device("cpu")


@pytest.fixture
def staging():
    return Staging(Streams(CPU, Timeline(CPU)))


def pieces():
    """Of several widths and strides, so that the copies have to be aligned."""
    matrix = torch.randn(6, 5)
    return [
        whole("mask", torch.tensor([True, False, True])),
        whole("weight", matrix.bfloat16().t()),
        whole("empty", torch.empty(0, 4)),
        ShardedTensor("rest", matrix[:, 1:4], (6, 3), (0, 0), writer=True),
        whole("count", torch.arange(3)),
        whole("scalar", torch.tensor(2.5)),
    ]


def begun(root, iteration, tensors, staging, **options):
    options = {"group": groups().world, "keep": None, **options}
    return PendingSave(root, iteration, tensors, {"seen": iteration}, staging=staging, **options)


def saved(path, tensors):
    into = empty_like(tensors)
    load(path, into, group=groups().world)
    return into


def test_the_files_are_those_of_a_save_that_waits(tmp_path, staging):
    tensors = pieces()
    save(tmp_path / "plain", 3, tensors, {"seen": 3}, group=groups().world, keep=None)
    pending = begun(tmp_path / "background", 3, tensors, staging)
    staging.before_write()
    for tensor in tensors:
        tensor.data.zero_()
    assert pending.finish() == find(tmp_path / "background", None)
    files = sorted(path.name for path in (tmp_path / "plain" / "iter_0000003").iterdir())
    assert files == ["__0_0.safetensors", "metadata.json"]
    for name in files:
        plain, background = (tmp_path / kind / "iter_0000003" / name for kind in ("plain", "background"))
        assert plain.read_bytes() == background.read_bytes()


def test_the_thread_waits_for_the_copies(tmp_path, staging):
    copies = threading.Event()
    staging._from_device.run(copies.wait, "an earlier copy")
    tensors = [whole("w", torch.arange(5.0))]
    pending = begun(tmp_path, 1, tensors, staging)
    threading.Timer(0.2, copies.set).start()
    assert same(saved(pending.finish(), tensors)[0].data, tensors[0].data)


def test_the_memory_is_allocated_once(tmp_path, staging):
    tensors = pieces()
    constant = [whole("constant", torch.ones(1000))]
    for iteration in (1, 2, 3):
        path = begun(tmp_path, iteration, tensors, staging, constant=constant).finish()
        assert all(same(a.data, b.data) for a, b in zip(saved(path, tensors + constant), tensors + constant))
    nbytes = sum(tensor.data.nbytes for tensor in tensors)
    assert staging._pool.num_allocated == 1 and staging.nbytes == nbytes <= staging._pool.nbytes


def test_remaining_parts(tmp_path, staging, monkeypatch):
    """Until the files are written 2, until the checkpoint has its name 1; `gather` waits for the files alone."""
    plain_write, written = storage.write_tensor_file, threading.Event()
    plain_publish, named = PendingSave._publish, threading.Event()

    def write(path, sources):
        written.wait()
        return plain_write(path, sources)

    def publish(pending):
        named.wait()
        plain_publish(pending)

    monkeypatch.setattr(storage, "write_tensor_file", write)
    monkeypatch.setattr(PendingSave, "_publish", publish)
    pending = begun(tmp_path, 7, [whole("w", torch.ones(2))], staging)
    assert pending.remaining == 2
    written.set()
    pending._work.synchronize()
    assert pending.remaining == 1
    pending.gather()
    assert pending.remaining == 1 and not (tmp_path / TRACKER).exists()
    named.set()
    assert pending.finish().name == "iter_0000007" and pending.remaining == 0
    assert (tmp_path / TRACKER).read_text() == "7\n"


def test_the_state_is_that_of_the_beginning(tmp_path, staging):
    state = {"steps": [1]}
    pending = PendingSave(tmp_path, 1, [], state, group=groups().world, keep=None, staging=staging)
    state["steps"].append(2)
    assert load(pending.finish(), [], group=groups().world) == {"steps": [1]}


def test_old_checkpoints_that_cannot_be_deleted_do_not_fail_the_save(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("megatron.core.dist_checkpointing.pending_save.prune", refuse)
    assert save(tmp_path, 1, [], {}, group=groups().world, keep=1) == find(tmp_path, None)
