"""Data parallelism on CUDA, alone on a device: its buckets, hooks and streams change nothing."""

import pytest
import torch

from tests import pool
from tests.gpu.cuda import CUDA, NEEDS_CUDA
from tests.parallel.strategies import FEW, STRATEGIES
from tests.unit.distributed.test_during_backward import MODELS, assert_buckets_leave_during_backward
from tests.unit.models.builds import (
    LLAMA,
    accumulate,
    assemble,
    make_data_parallel,
    make_ids,
    make_model,
    pieces,
)

pytestmark = NEEDS_CUDA


def gradients_of(settings, groups, device):
    """Pieces of a step of two microbatches."""
    model = make_model(LLAMA, groups, device=device)
    data_parallel = make_data_parallel(model, groups, bucket_size=1000, **settings)
    accumulate(model, data_parallel, [ids.to(device) for ids in make_ids(8, 16).chunk(2)])
    data_parallel.synchronize()
    return pieces(data_parallel)


@pytest.mark.parametrize("strategy", FEW)
def test_alone_every_strategy_gives_the_same_bits(strategy):
    groups = pool.groups()
    expected = assemble([gradients_of({}, groups, CUDA)])
    found = assemble([gradients_of(STRATEGIES[strategy], groups, CUDA)])
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_buckets_leave_during_backward(fields):
    assert_buckets_leave_during_backward(fields, CUDA)
