"""The gated delta rule and its convolution over a cut sequence against one process."""

import pytest
import torch

from megatron.core.context_parallel import layout
from megatron.core.context_parallel.delta_rule import context_parallel_conv, context_parallel_delta_rule
from megatron.kernels.ops.attention_segments import segments_of, starts_of
from megatron.kernels.ops.causal_conv import causal_conv
from tests import pool
from tests.parallel.context import CPU, error, joined
from tests.unit.kernels.close import random
from tests.unit.kernels.test_delta_rule import K_DIM, V_DIM, V_HEADS, arguments, by_token

HEADS = (4, 4)
TOLERANCE = 1e-5  # of the largest element
# Documents that chunk borders cut, some of one token, and one over three chunks of four ranks.
IDS = torch.stack(
    [torch.arange(48) // 13, torch.bucketize(torch.arange(48), torch.tensor([5, 6, 7, 28, 47]), right=True)]
)
STARTS = {"one document": None, "documents": starts_of(segments_of(IDS, CPU))}


def conv_inputs(s=48):
    """x, weight and the gradient of the output."""
    return random(s, 2, 6, seed=1), random(6, 1, 4, seed=2), random(s, 2, 6, seed=3)


def results(rank, size, channels, starts):
    """This rank's [out and gradients] by heads and by states, and of convolutions; and its collectives."""
    cp = pool.groups(cp=size).cp
    whole = arguments(48, channels=channels, heads=HEADS)[:5]
    grad = layout.take(random(48, 2, HEADS[1], V_DIM, seed=9), 0, rank, size)
    found, calls = [], []
    for comm_type in ("a2a", "p2p"):
        leaves = [layout.take(x, 0, rank, size).clone().requires_grad_() for x in whole]
        with cp.heartbeat.record() as recorded:
            out = context_parallel_delta_rule(comm_type, cp)(*leaves, starts)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
        calls.append([(call.op, call.shape) for call in recorded])
    convolved = []
    for s in (48, 4 * size):  # the chunks of the second have 2 tokens, fewer than a window
        x, weight, grad = conv_inputs(s)
        x, grad = (layout.take(tokens, 0, rank, size).clone() for tokens in (x, grad))
        leaves = x.requires_grad_(), weight.requires_grad_()
        out = context_parallel_conv(*leaves, None if starts is None else starts[:, :s], cp)
        convolved.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    return found, convolved, calls


def in_double(function, inputs, grad):
    """[out and gradients] of one process."""
    leaves = [x.double().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


@pytest.mark.parametrize("channels", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("size", [2, 4])
def test_as_one_process(size, starts, channels):
    zeros = torch.zeros(2, HEADS[1], K_DIM, V_DIM, dtype=torch.float64)
    found, convolved, _ = zip(*pool.run(size, results, channels, starts), strict=True)
    inputs, grad = arguments(48, channels=channels, heads=HEADS)[:5], random(48, 2, HEADS[1], V_DIM, seed=9)
    expected = in_double(lambda *args: by_token(*args, zeros, starts)[0], inputs, grad)
    for of_ranks in zip(*found, strict=True):
        for number, (a, b) in enumerate(zip(joined(of_ranks), expected, strict=True)):
            assert error(a, b) < TOLERANCE, number
    for s, of_ranks in zip((48, 4 * size), zip(*convolved, strict=True), strict=True):
        x, weight, grad = conv_inputs(s)
        first = None if starts is None else starts[:, :s]
        out, grad_x, grad_weight = in_double(
            lambda x, w, first=first: causal_conv(x, w, starts=first), [x, weight], grad
        )
        for a, b in zip(joined([rank[:2] for rank in of_ranks]), (out, grad_x), strict=True):
            assert error(a, b) < TOLERANCE
        assert error(sum(rank[2] for rank in of_ranks), grad_weight) < TOLERANCE


def test_communication():
    """The messages of the docstring: by heads two for the inputs and one for the outputs; by states one gather."""
    (_, _, (by_heads, by_states)), _ = pool.run(2, results, False, None)
    assert [op for op, _ in by_heads] == ["all_to_all"] * 6
    state = (2, 2, V_HEADS, K_DIM, K_DIM + V_DIM)
    assert by_states == [("all_gather", state)] * 2
