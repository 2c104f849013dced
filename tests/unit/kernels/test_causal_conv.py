"""The causal convolution against torch's, in documents and steps."""

import pytest
import torch
import torch.nn.functional as F

from megatron.kernels.ops.causal_conv import causal_conv, last_inputs
from tests.unit.kernels.close import assert_same, random

CHANNELS = 6


def whole(x, weight, window):
    """silu of torch's convolution over the window and x."""
    inputs = torch.cat([window, x]).permute(1, 2, 0)
    return F.silu(F.conv1d(inputs, weight, groups=weight.shape[0])).permute(2, 0, 1)


def inputs(s, width):
    """x, weight and window."""
    shapes = (s, 2, CHANNELS), (CHANNELS, 1, width), (width - 1, 2, CHANNELS)
    return [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize(("s", "width"), [(9, 4), (2, 4), (1, 4), (5, 2)])
def test_is_that_of_torch(s, width):
    x, weight, window = inputs(s, width)
    assert_same(lambda x, w, before: causal_conv(x, w, window=before), whole, [x, weight, window])
    assert_same(causal_conv, lambda x, w: whole(x, w, torch.zeros_like(window, dtype=x.dtype)), [x, weight])


def test_documents():
    """A document sees zeros before its first token, also in place of the window."""
    x, weight, window = inputs(10, 4)
    starts = torch.zeros(2, 10, dtype=torch.bool)
    starts[0, [0, 1, 4]] = starts[1, [2, 9]] = True

    def alone(x, weight, window):
        zeros = torch.zeros_like(window[:, :1])
        first = [whole(part, weight, zeros) for part in x[:, :1].split([1, 3, 6])]
        goes_on, *others = x[:, 1:].split([2, 7, 1])
        second = [whole(goes_on, weight, window[:, 1:]), *(whole(part, weight, zeros) for part in others)]
        return torch.cat([torch.cat(first), torch.cat(second)], 1)

    assert_same(lambda x, w, before: causal_conv(x, w, window=before, starts=starts), alone, [x, weight, window])


@pytest.mark.parametrize("sizes", [(4, 1, 1, 4), (1, 2, 7), (10,)])
def test_parts_continue_each_other(sizes):
    """Windows carry the inputs over, and those of a document that has ended are zero."""
    x, weight, _ = inputs(10, 4)
    starts = torch.zeros(2, 10, dtype=torch.bool)
    starts[0, [3, 8]] = starts[1, 5] = True
    for documents in (None, starts):
        window, outs, place = None, [], 0
        for size in sizes:
            part = x[place : place + size]
            first = None if documents is None else documents[:, place : place + size]
            outs.append(causal_conv(part, weight, window=window, starts=first))
            window = last_inputs(part, 4, window=window, starts=first)
            place += size
        torch.testing.assert_close(torch.cat(outs), causal_conv(x, weight, starts=documents))
        expected = x[-3:].clone()
        if documents is not None:
            expected[0, 0] = 0  # token 7 of the first sample: its last document begins at token 8
        assert window.equal(expected)


def test_keeps_its_arguments_only():
    x, weight, window = (t.requires_grad_() for t in inputs(9, 4))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = causal_conv(x, weight, window=window)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (x, weight, window)}
    assert out.untyped_storage().nbytes() == out.nbytes


def test_half_precision_rounds_once():
    x, weight, window = (t.bfloat16() for t in inputs(9, 4))
    out = causal_conv(x, weight, window=window)
    assert out.dtype == torch.bfloat16
    assert out.equal(whole(x.double(), weight.double(), window.double()).bfloat16())
