"""From token ids to a batch, against rules written out token by token."""

import itertools
import time
from multiprocessing import active_children

import pytest
import torch
import torch.nn.functional as F

from megatron.base.errors import DataError
from megatron.config.data import DataConfig
from megatron.core.datasets.loader import build_loader
from megatron.core.groups import Group
from megatron.kernels.ops.attention_segments import segments_of
from megatron.training import main
from megatron.training.batch import BatchReader, make_batch, make_sft_batch, part_of_batch, stacked_for
from megatron.training.microbatches import Targets, tensors_of
from megatron.training.signals import ExitSignals
from tests import pool
from tests.unit.config.runs import SHORT_RUN, make_run

EOD = 0
CPU = torch.device("cpu")
FLAGS = [dict(zip(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), f)) for f in
         itertools.product([False, True], repeat=3)]  # fmt: skip


def slow(row, data):
    """(labels, mask, positions, segments) of one row [s + 1], one token after the other."""
    labels, mask, positions, segments = [], [], [], []
    position = segment = 0
    for token, following in itertools.pairwise(row):
        labels.append(following)
        mask.append(not (data.eod_mask_loss and token == EOD))
        positions.append(position)
        segments.append(segment)
        position += 1
        if token == EOD:
            segment += 1
            if data.reset_position_ids:
                position = 0
    return labels, mask, positions, segments


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(k for k, v in flags.items() if v) or "none")
@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2, 3, 4, 5, 6]],
        [[1, 0, 3, 4, 0, 6], [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0], [0, 0, 0, 0, 0, 0], [1, 0, 0, 2, 0, 0]],
    ],
    ids=["one document", "several"],
)
def test_against_the_rules(flags, rows):
    data = DataConfig(**flags)
    ids = torch.tensor(rows)
    batch = make_batch(ids, EOD, data)
    expected = [torch.tensor(x) for x in zip(*(slow(row, data) for row in rows), strict=True)]
    assert batch.tokens.equal(ids[:, :-1]) and batch.tokens.is_contiguous() and batch.labels.is_contiguous()
    assert batch.labels.equal(expected[0])
    assert batch.loss_mask.equal(expected[1]) and batch.loss_mask.dtype == torch.bool
    assert batch.positions.expand_as(ids[:, :-1]).equal(expected[2])
    if data.reset_attention_mask:
        assert batch.segments.ids.equal(expected[3])
    else:
        assert batch.segments is None


def test_random_rows():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 4, (50, 33), generator=generator)
    data = DataConfig(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    batch = make_batch(ids, EOD, data)
    labels, mask, positions, segments = zip(*(slow(row, data) for row in ids.tolist()), strict=True)
    assert batch.labels.tolist() == list(labels) and batch.loss_mask.tolist() == list(mask)
    assert batch.positions.tolist() == list(positions) and batch.segments.ids.tolist() == list(segments)


@pytest.mark.parametrize("s", [8, 9])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_part_of_a_context_parallel_rank_has_all_documents(rank, s):
    """Nine tokens are padded to twelve, and the padding of each sample is a document of its own."""
    ids = torch.randint(0, 4, (3, s + 1), generator=torch.Generator().manual_seed(0))
    batch = make_batch(ids, EOD, DataConfig(reset_attention_mask=True))
    part = part_of_batch(batch, Group("cp", (0, 1), rank, None, None))
    padded = F.pad(batch.segments.ids, (0, -s % 4), value=-1)
    assert part.tokens.shape == (3, padded.shape[1] // 2) and part.segments.ids.equal(padded)
    expected = segments_of(padded, CPU)
    assert part.segments.starts.equal(expected.starts) and part.segments.lengths == expected.lengths


def test_all_tensors_of_a_step_are_known():
    """So that no offload moves one that all layers read."""
    batch = make_batch(torch.ones(2, 9, dtype=torch.long), EOD, DataConfig(reset_attention_mask=True))
    found = {x.data_ptr() for x in tensors_of([batch], [[Targets.of(batch)]])}
    assert {batch.segments.ids.data_ptr(), batch.segments.starts.data_ptr(), batch.tokens.data_ptr()} <= found


def test_the_host_finds_documents_in_its_own_ids():
    """Tensors of the meta device cannot be copied to the host."""
    ids = torch.randint(0, 4, (3, 9), generator=torch.Generator().manual_seed(0))
    data = DataConfig(reset_attention_mask=True)
    batch = make_batch(ids.to("meta"), EOD, data, ids)
    assert batch.segments.lengths == make_batch(ids, EOD, data).segments.lengths
    rows = torch.stack([ids, ids, ids // 2], dim=1)
    assert make_sft_batch(rows.to("meta"), rows).segments.lengths == make_sft_batch(rows).segments.lengths
    with pytest.raises(NotImplementedError, match="meta"):
        make_batch(ids.to("meta"), EOD, data)


def test_positions_are_shared_where_they_can_be():
    ids = torch.ones(3, 9, dtype=torch.long)
    assert make_batch(ids, EOD, DataConfig()).positions.shape == (1, 8)
    assert make_batch(ids, EOD, DataConfig(reset_position_ids=True)).positions.shape == (3, 8)


def reader(loader):
    return BatchReader(loader, DataConfig(seq_length=4), eod=EOD, micro_batch_size=2, groups=pool.groups(), device=CPU)


def test_reads_in_order():
    samples = torch.arange(1, 41).view(4, 2, 5)
    read = reader(iter(samples))
    batches = [*read.read(3), *read.read(1)]
    assert torch.stack([b.tokens for b in batches]).equal(samples[:, :, :-1])


def test_documents_are_found_by_the_function_that_is_passed():
    received = []

    def find(ids, device):
        received.append(ids.tolist())
        return segments_of(torch.zeros_like(ids), device)

    data = DataConfig(seq_length=4, reset_attention_mask=True)
    samples = torch.tensor([[[1, EOD, 2, 3, 4]]])
    read = BatchReader(
        iter(samples), data, eod=EOD, micro_batch_size=1, groups=pool.groups(), device=CPU, find_segments=find
    )
    (batch,) = read.read(1)
    assert received == [[[0, 0, 1, 1]]] and not batch.segments.ids.any()


def test_closing_ends_the_processes_that_load():
    """At once, although they ignore SIGTERM and a cycle of references keeps the reader alive."""
    before = set(active_children())
    samples = torch.arange(400).view(80, 5)
    numbers = {"consumed_samples": 0, "micro_batch_size": 2, "dp_rank": 0, "dp_size": 1, "num_workers": 2, "seed": 1}
    read = reader(build_loader(Rows(samples.numpy()), **numbers))
    kept: list = [read]
    kept.append(kept)
    read.read(1)
    workers = set(active_children()) - before
    assert len(workers) == 2
    read.close()
    assert not any(worker.is_alive() for worker in workers)


def test_a_run_leaves_no_process_that_loads(monkeypatch):
    before, trainers, build = set(active_children()), [], main.build

    def keep(*args):
        trainers.append(build(*args))
        return trainers[-1]

    monkeypatch.setattr(main, "build", keep)
    short = {
        **SHORT_RUN,
        "num_workers": 1,
        "num_layers": 1,
        "train_iters": 1,
        "global_batch_size": 2,
        "progress_bar": False,
    }
    main.pretrain(
        make_run(**short), 0, 1, 0, 0, time.monotonic(), ExitSignals(enabled=False), main.build, lambda *_: []
    )
    assert trainers[0].state.iteration == 1 and not set(active_children()) - before


class Rows:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


def test_samples_for_cuda_are_in_page_locked_memory(monkeypatch):
    """Only from there is a copy asynchronous. A CPU cannot lock pages: the memory that is asked for is recorded."""
    made, empty = [], torch.empty

    def record(*shape, pin_memory, **options):
        made.append((empty(*shape, **options), pin_memory))
        return made[-1][0]

    monkeypatch.setattr(torch, "empty", record)
    samples = list(torch.arange(1, 41).view(4, 2, 5))
    for device, locked in ((torch.device("cuda", 0), True), (CPU, False)):
        out = stacked_for(samples, device)
        memory, pinned = made.pop()
        assert pinned is locked and out.data_ptr() == memory.data_ptr()
        assert out.equal(torch.stack(samples))


def test_a_users_error_is_marked_as_this_ranks_own():
    def broken():
        yield torch.ones(2, 5, dtype=torch.long)
        raise DataError("used up")

    with pytest.raises(DataError, match="used up") as caught:
        reader(broken()).read(2)
    assert caught.value.on_all_ranks is False
