"""A model with a sliding window in one of its two layers, sharded over tp, against one process."""

import pytest
import torch

from tests import pool
from tests.unit.models.builds import (
    LLAMA,
    assemble,
    assert_gradients,
    backward,
    losses,
    make_data_parallel,
    make_ids,
    make_model,
    pieces,
)

WINDOWED = {**LLAMA, "window_size": "4,0", "window_attn_skip_freq": "2"}


def trained(rank, size, fields, sequence_parallel=False):
    """(loss per token, this rank's pieces of the gradient)"""
    groups = pool.groups(tp=size)
    model = make_model(fields, groups, spread=0.1, sequence_parallel=sequence_parallel)
    data_parallel = make_data_parallel(model, groups)
    loss = losses(model, make_ids(2, 16))
    backward(data_parallel, loss.sum())
    return loss.detach(), pieces(data_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_window_under_tp(sequence_parallel):
    ((expected, alone),) = pool.run(1, trained, WINDOWED)
    found = pool.run(2, trained, WINDOWED, sequence_parallel)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert_gradients(assemble([gradient for _, gradient in found]), assemble([alone]))
    ((full, _),) = pool.run(1, trained, LLAMA)
    assert (full - expected)[:, 5:].abs().max() > 1e-2, "the window is felt"
