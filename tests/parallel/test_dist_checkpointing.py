import builtins
import dataclasses
import errno
import itertools
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.base.errors import CheckpointError, CommError
from megatron.base.heartbeat import Heartbeat
from megatron.core.dist_checkpointing import storage, store, tensor_file
from megatron.core.dist_checkpointing.folders import TRACKER, find
from megatron.core.dist_checkpointing.sharded_tensor import flat_slice
from megatron.core.groups import store_transport
from tests import pool
from tests.unit.dist_checkpointing.pieces import empty_like, same, shard, whole

ROWS, COLUMNS = 8, 12


def model():
    """The global tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return {
        "matrix": torch.randn(ROWS, COLUMNS, generator=generator),
        "bf16": torch.randn(ROWS, COLUMNS, generator=generator).bfloat16(),
        "moment": torch.randn(ROWS, COLUMNS, generator=generator),
        "bias": torch.randn(ROWS, generator=generator),
        "step": torch.tensor(7),
    }


def layout(dim, rank, size):
    """matrices sharded along `dim`, the moment in flat slices of unequal length, the rest replicated."""
    full = model()
    cuts = [i * ROWS * COLUMNS // size - (i % 2) * 5 for i in range(size)] + [ROWS * COLUMNS]
    start, stop = cuts[rank], cuts[rank + 1]
    geometry = {"shape": (ROWS, COLUMNS), "global_shape": (ROWS, COLUMNS), "offset": (0, 0)}
    return [
        shard("matrix", full["matrix"], dim, rank, size),
        shard("bf16", full["bf16"], 1 - dim, rank, size),
        *flat_slice("moment", full["moment"].view(-1)[start:stop], start=start, writer=True, **geometry),
        whole("bias", full["bias"], writer=rank == size - 1),
        whole("step", full["step"], writer=rank == 0),
    ]


def save_layout(rank, size, root, dim, iteration=100):
    state = {"saved_by": rank, "size": size}
    path = store.save(Path(root), iteration, layout(dim, rank, size), state, group=pool.groups().world, keep=None)
    return str(path)


def load_layout(rank, size, path, dim):
    expected = layout(dim, rank, size)
    into = empty_like(expected)
    state = store.load(Path(path), into, group=pool.groups().world)
    assert all(same(a.data, b.data) for a, b in zip(expected, into))
    return state


@pytest.mark.parametrize(("savers", "loaders"), [(2, 4), (4, 2), (4, 1), (1, 4), (2, 2)])
def test_a_checkpoint_loads_under_another_layout(tmp_path, savers, loaders):
    path = pool.run(savers, save_layout, str(tmp_path), 0)[0]
    assert len(list(Path(path).glob("*.safetensors"))) == savers
    for dim in (0, 1):
        states = pool.run(loaders, load_layout, path, dim)
        assert states == [{"saved_by": 0, "size": savers}] * loaders


def test_replicas_are_written_once(tmp_path):
    path = Path(pool.run(4, save_layout, str(tmp_path), 1)[0])
    saved = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    data = sum(tensor.nbytes for tensor in model().values())
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in path.glob("*.safetensors"))
    assert saved == data + headers


def load_one_flat_slice(rank, size, path):
    full = model()["moment"].view(-1)
    geometry = {"shape": (ROWS, COLUMNS), "global_shape": (ROWS, COLUMNS), "offset": (0, 0), "writer": True}
    for start, stop in itertools.combinations(range(rank, full.numel() + 1, 7), 2):
        data = torch.zeros(stop - start)
        store.load(path, flat_slice("moment", data, start=start, **geometry), group=pool.groups().world)
        assert torch.equal(data, full[start:stop])


def test_any_flat_slice_can_be_read_from_any_other(tmp_path):
    path = Path(pool.run(4, save_layout, str(tmp_path), 0)[0])
    load_one_flat_slice(0, 1, path)


def save_with_full_disk(rank, size, root, where, broken):
    """Save while `broken` ranks' writes fail; returns this rank's error."""
    real_write, real_open = tensor_file._crc, builtins.open

    def no_space(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the file")

    def open_full(path, *args, **kwargs):
        return no_space() if str(path).endswith(where) else real_open(path, *args, **kwargs)

    if rank in broken and where == "data":
        tensor_file._crc = no_space
    elif rank in broken:
        builtins.open = open_full
    try:
        save_layout(rank, size, root, 0, iteration=120)
    except CheckpointError as error:
        return str(error)
    finally:
        tensor_file._crc, builtins.open = real_write, real_open
    return None


@pytest.mark.parametrize(
    ("where", "broken"), [("data", (1,)), ("data", (0, 1)), ("metadata.json", (0,)), (f"{TRACKER}.tmp", (0,))]
)
def test_a_full_disk_on_one_rank_fails_the_save_on_all(tmp_path, where, broken):
    pool.run(2, save_layout, str(tmp_path), 0)
    errors = pool.run(2, save_with_full_disk, str(tmp_path), where, broken)
    for error in errors:
        for rank in broken:
            assert f"rank {rank}: ENOSPC: No space left on device" in error
        assert f"rank {1 - broken[0]}: ENOSPC" not in error or len(broken) == 2
        assert "could not save iteration 120" in error and "\n" not in error
    assert {entry.name for entry in tmp_path.iterdir()} == {"iter_0000100", TRACKER}
    assert (tmp_path / TRACKER).read_text() == "100\n"
    pool.run(2, load_layout, str(find(tmp_path, None)), 1)
    # The same world saves again, so no rank was left behind in a collective.
    pool.run(2, save_layout, str(tmp_path), 1, 120)
    pool.run(2, load_layout, str(find(tmp_path, None)), 0)


def die_while_writing(rank, size, root):
    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        tensor_file._crc = die
    save_layout(rank, size, root, 0, iteration=120)


def test_a_rank_that_dies_while_saving_ends_the_save_and_not_the_last_checkpoint(tmp_path):
    mortal = pool.Pool(2)
    mortal.run(save_layout, str(tmp_path), 0)
    with pytest.raises(AssertionError, match=r"CommError: checkpoint write number \d+ on group world \(ranks 0, 1\)"):
        mortal.run(die_while_writing, str(tmp_path))
    assert find(tmp_path, None) == tmp_path / "iter_0000100"
    pool.run(2, load_layout, str(find(tmp_path, None)), 1)
    pool.run(2, save_layout, str(tmp_path), 0, 120)
    assert {entry.name for entry in tmp_path.iterdir()} == {"iter_0000100", "iter_0000120", TRACKER}


def write_slowly(rank, size, root, seconds):
    """Saves where rank 0 writes for some seconds and a collective may take half of one. Returns this rank's error."""
    plain = storage.write_tensor_file

    def slow(*args):
        if rank == 0:
            time.sleep(seconds)
        return plain(*args)

    publish, read = store_transport(dist.distributed_c10d._get_default_store(), rank)
    heartbeat = Heartbeat(rank, publish=publish, read=read, interval=0.1, timeout=0.5)
    heartbeat.start()
    group = dataclasses.replace(pool.groups().world, heartbeat=heartbeat)
    storage.write_tensor_file = slow
    try:
        with heartbeat.phase("save-checkpoint"):
            store.save(Path(root), 120, layout(0, rank, size), {}, group=group, keep=None)
    except CommError as error:
        return str(error)
    finally:
        storage.write_tensor_file = plain
        heartbeat.stop()
    return None


def test_a_slow_save_is_waited_for_and_named_if_it_never_ends(tmp_path):
    """Longer than for a collective of training, which would find that all ranks have arrived."""
    slow = pool.Pool(2)
    assert slow.run(write_slowly, str(tmp_path), 1.0) == [None, None]
    _, error = slow.run(write_slowly, str(tmp_path), 5.0)
    assert "checkpoint write" in error and "rank 0 is not done (phase 'save-checkpoint', writing its files for" in error
    slow.close()  # stopped processes would never end, and pytest waits for them


def error_of(rank, size, make_pieces, root, path):
    """This rank's error of saving or loading what `make_pieces` gives it."""
    world = pool.groups().world
    pieces = make_pieces(rank)
    try:
        if path is None:
            store.save(Path(root), 100, pieces, {}, group=world, keep=None)
        else:
            store.load(Path(path[rank]), pieces, group=world)
    except CheckpointError as error:
        return str(error)
    return None


def hole(rank):
    return [shard("w", torch.zeros(4, 4), 0, rank, 2, writer=rank == 0)]


def overlap(rank):
    return [whole("w", torch.zeros(4, 4))]


def other_shapes(rank):
    return [whole("w", torch.zeros(4, 4 + rank), writer=rank == 0)]


def other_dtypes(rank):
    return [whole("w", torch.zeros(4, dtype=(torch.float32, torch.float16)[rank]), writer=rank == 0)]


def only_rank_one_has_it(rank):
    return [whole("w", torch.zeros(4), writer=False)] if rank else []


@pytest.mark.parametrize(
    ("make_pieces", "message"),
    [
        (hole, "w [4, 4]: no rank writes elements [2:4, 0:4]"),
        (overlap, "w [4, 4]: elements [0:4, 0:4] would be written twice"),
        (other_shapes, "w is torch.float32 [4, 4] on rank 0 and torch.float32 [4, 5] on rank 1"),
        (other_dtypes, "w is torch.float32 [4] on rank 0 and torch.float16 [4] on rank 1"),
        (only_rank_one_has_it, "w [4]: no rank writes elements [0:4]"),
    ],
)
def test_ranks_that_disagree_save_nothing(tmp_path, make_pieces, message):
    errors = pool.run(2, error_of, make_pieces, str(tmp_path), None)
    assert all(message in error for error in errors)
    assert list(tmp_path.iterdir()) == []


def wrong_on_rank_one(rank):
    full = model()
    return [whole("bias", full["bias"].clone()) if rank == 0 else whole("bias", torch.zeros(ROWS + 1))]


def bias_and_matrix(rank):
    return empty_like(layout(0, rank, 2))


def test_an_error_of_one_rank_reaches_all_when_loading(tmp_path):
    path = pool.run(2, save_layout, str(tmp_path), 0, 80)[0]
    errors = pool.run(2, error_of, wrong_on_rank_one, str(tmp_path), [path, path])
    assert all(f"rank 1: bias is [{ROWS}] in the checkpoint and [{ROWS + 1}] here" in error for error in errors)
    assert all("rank 0" not in error for error in errors)

    newer = pool.run(2, save_layout, str(tmp_path), 0, 100)[0]
    errors = pool.run(2, error_of, bias_and_matrix, str(tmp_path), [newer, path])
    assert all("rank 1: the first rank loads iter_0000100, this rank iter_0000080" in error for error in errors)

    file = Path(newer) / "__1_0.safetensors"  # only rank 1 reads what rank 1 wrote
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    errors = pool.run(2, error_of, bias_and_matrix, str(tmp_path), [newer, newer])
    for error in errors:
        assert "__1_0.safetensors is damaged: tensor" in error and "--ckpt-step 80 loads" in error
    pool.run(2, load_layout, path, 1)
