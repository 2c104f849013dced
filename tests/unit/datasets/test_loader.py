"""The order of samples over ranks, resuming in it under another layout, and what ends a loader."""

import os

import numpy as np
import pytest
import torch

from megatron.base.errors import DataError
from megatron.core.datasets.loader import MicrobatchSampler, build_loader


class Numbers:
    """Sample n is [n, n + 1]; sample `bad` is damaged."""

    def __init__(self, size, bad=None):
        self.size, self.bad = size, bad

    def __len__(self):
        return self.size

    def __getitem__(self, number):
        if number == self.bad:
            raise DataError(f"sample {number} is damaged")
        return np.array([number, number + 1])


def load(dataset, dp_rank=0, **settings):
    defaults = {"consumed_samples": 0, "micro_batch_size": 2, "dp_size": 1, "num_workers": 0, "seed": 1}
    return build_loader(dataset, dp_rank=dp_rank, **{**defaults, **settings})


def global_order(dataset, microbatches, dp_size, **settings):
    """Samples that all ranks read together, microbatch by microbatch."""
    loaders = [load(dataset, rank, dp_size=dp_size, **settings) for rank in range(dp_size)]
    return [int(n) for _ in range(microbatches) for loader in loaders for n in next(loader)[:, 0]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_microbatches(num_workers):
    batches = [
        next_batch for next_batch, _ in zip(load(Numbers(100), dp_rank=1, dp_size=3, num_workers=num_workers), range(4))
    ]
    assert all(batch.dtype == torch.int64 and batch.shape == (2, 2) for batch in batches)
    assert [batch[:, 0].tolist() for batch in batches] == [[2, 3], [8, 9], [14, 15], [20, 21]]
    assert (torch.stack(batches)[..., 1] == torch.stack(batches)[..., 0] + 1).all()


@pytest.mark.parametrize("dp_size, micro_batch_size", [(1, 1), (1, 4), (2, 2), (3, 1), (4, 3)])
def test_every_layout_reads_the_same_order(dp_size, micro_batch_size):
    run = dp_size * micro_batch_size
    order = global_order(Numbers(1000), 24 // run, dp_size, micro_batch_size=micro_batch_size)
    assert order == list(range(24 // run * run))


@pytest.mark.parametrize("dp_size, micro_batch_size", [(1, 3), (2, 1), (3, 2)])
@pytest.mark.parametrize("consumed", [0, 6, 17, 90])
def test_resume_under_another_layout(consumed, dp_size, micro_batch_size):
    order = global_order(Numbers(1000), 4, dp_size, micro_batch_size=micro_batch_size, consumed_samples=consumed)
    assert order == list(range(consumed, consumed + 4 * dp_size * micro_batch_size))


def test_batches_need_no_shared_memory(monkeypatch):
    """With a full /dev/shm torch would lose a tensor in the worker, and this process would wait for ever."""

    def full(*others):
        os._exit(3)  # in the worker, which inherits this

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full)
    loader = load(Numbers(100), num_workers=1)
    assert [next(loader)[:, 0].tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_sampler_length():
    settings = {"micro_batch_size": 2, "dp_rank": 0, "dp_size": 3}
    for samples, consumed, expected in [(12, 0, 2), (17, 0, 2), (18, 6, 2), (5, 0, 0), (5, 9, 0)]:
        sampler = MicrobatchSampler(samples, consumed_samples=consumed, **settings)
        assert len(sampler) == expected == len(list(sampler))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_end_of_the_dataset_is_an_error_after_the_last_whole_microbatch(num_workers):
    loader = load(Numbers(11), consumed_samples=2, num_workers=num_workers)
    assert [next(loader)[:, 0].tolist() for _ in range(4)] == [[2, 3], [4, 5], [6, 7], [8, 9]]
    with pytest.raises(
        DataError, match="the dataset's 11 samples are used up: 2 were consumed before and 4 microbatches"
    ):
        next(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_damaged_sample_is_one_line_from_any_process(num_workers):
    loader = load(Numbers(100, bad=5), num_workers=num_workers)
    assert next(loader)[:, 0].tolist() == [0, 1] and next(loader)[:, 0].tolist() == [2, 3]
    with pytest.raises(DataError) as caught:
        next(loader)
    assert str(caught.value) == "sample 5 is damaged"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_callers_random_state_is_not_drawn_from(num_workers):
    before = torch.get_rng_state()
    loader = load(Numbers(100), num_workers=num_workers)
    next(loader)
    assert torch.equal(before, torch.get_rng_state())


def test_workers_prepare_the_samples():
    class Pid(Numbers):
        def __getitem__(self, number):
            return np.array([os.getpid()])

    loader = load(Pid(100), num_workers=2)
    pids = {int(next(loader)[0, 0]) for _ in range(6)}
    assert len(pids) == 2 and os.getpid() not in pids
    assert int(next(load(Pid(100)))[0, 0]) == os.getpid()


class Sums(Numbers):
    """A sample needs a loop that torch would share between threads."""

    def __getitem__(self, number):
        assert torch.ones(2**20).sum() == 2**20
        return super().__getitem__(number)


def test_workers_of_a_process_with_threads_of_openmp():
    """They are forks of the training process, and would wait for its threads if torch did not give them one thread
    each."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(2**22).sum()
    batch = next(load(Sums(10), num_workers=1))
    torch.set_num_threads(before)
    assert batch[:, 0].tolist() == [0, 1]
