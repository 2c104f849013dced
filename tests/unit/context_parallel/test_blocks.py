"""Blocks merged and gradients added up are the attention of one process, for any number of ranks."""

import pytest
import torch

from megatron.core.context_parallel.block_plan import Block
from megatron.core.context_parallel.blocks import Attention, PairShape, joined
from megatron.kernels.ops import attention_lse
from megatron.kernels.ops.attention_rule import Drop
from megatron.kernels.ops.attention_scores import Scores
from tests.unit.context_parallel import simulated
from tests.unit.kernels.close import random

KERNELS = {"reference": (attention_lse.reference, 2), **{f"cpu {n}": (attention_lse.cpu, n) for n in (1, 2, 5)}}


def inputs(s, n, g, dtype=torch.float32):
    return [random(s, 2, heads, 8, dtype=dtype, seed=seed) for seed, heads in enumerate((n, g, g, n))]


def ids_of(*samples):
    """Of documents of these lengths in each sample."""
    return torch.stack([torch.repeat_interleave(torch.arange(len(each)), torch.tensor(each)) for each in samples])


# Documents over several chunks of 4 and more tokens, of one token, in the middle of a chunk, and one for each token.
DOCUMENTS = {
    "": None,
    "eleven": torch.arange(40).expand(2, 40) // 11,
    "uneven": ids_of((1, 3, 1, 1, 23, 2, 9), (39, 1)),
    "tokens": ids_of((1,) * 40, (20, 1, 19)),
}
SEGMENTS = pytest.mark.parametrize("segments", DOCUMENTS.values(), ids=DOCUMENTS)


@pytest.mark.parametrize(("kernel", "size"), KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("run", [simulated.ring, simulated.gathered])
@SEGMENTS
@pytest.mark.parametrize("window", [None, 1, 9])
def test_as_one_process(kernel, size, run, segments, window):
    data = inputs(40, 4, 2)
    found = run(kernel, *data, size, segments, window)
    for a, b in zip(found, simulated.exact(*data, segments, window), strict=True):
        scale = float(b.abs().max()) or 1.0  # a window of one gives queries and keys no gradient
        assert (a.double() - b).abs().max() <= 3e-6 * scale


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("run", [simulated.ring, simulated.gathered])
@pytest.mark.parametrize("window", [None, 9])
def test_capped_scores_as_one_process(size, run, window):
    data, scores = inputs(40, 4, 2), Scores(1.3, 1.5)
    segments = torch.arange(40).expand(2, 40) // 11
    found = run(attention_lse.by_rows, *data, size, segments, window, scores=scores)
    for a, b in zip(found, simulated.exact(*data, segments, window, scores=scores), strict=True):
        assert (a.double() - b).abs().max() <= 3e-6 * float(b.abs().max())


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("run", [simulated.ring, simulated.gathered])
@SEGMENTS
@pytest.mark.parametrize("window", [None, 9])
def test_dropout_as_one_process(size, run, segments, window):
    """The same pairs are dropped however the sequence is cut: output and gradients are those of one mask."""
    data = inputs(40, 4, 2)
    places = torch.arange(40, dtype=torch.int32)
    drop = Drop(0.4, torch.tensor([3], dtype=torch.int32), places, places)
    found = run(attention_lse.with_dropout(attention_lse.cpu), *data, size, segments, window, drop)
    expected = simulated.exact(*data, segments, window, drop.factors(2, 4))
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).abs().max() <= 3e-6 * float(b.abs().max())
    assert not torch.allclose(found[0].double(), simulated.exact(*data, segments, window)[0], rtol=0.1)


def test_merges_are_fp32():
    """Sixteen blocks of bf16: off by no more than the rounding of a block's output, and of the result."""
    q, k, v, _ = inputs(80, 4, 2, torch.bfloat16)
    attention = Attention(attention_lse.reference, q, PairShape.of(k, v))
    blocks = [Block(slice(0, 80), slice(5 * n, 5 * n + 5), None, None) for n in range(16)]
    attention.add(joined(k, v), blocks, attention_lse.Rule(simulated.SCORES))
    whole, lse = attention_lse.reference.forward(*(x.double() for x in (q, k, v)), attention_lse.Rule(simulated.SCORES))
    assert attention.out.dtype == attention.lse.dtype == torch.float32
    torch.testing.assert_close(attention.out.double(), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(attention.lse.double(), lse, rtol=1e-5, atol=1e-6)


def test_very_different_blocks():
    """A block that outweighs all others, first or last, and scores that would overflow an exponential."""
    q, k, v, _ = inputs(8, 2, 2)
    q, k = 30 * q, 30 * k
    whole, lse = attention_lse.reference.forward(*(x.double() for x in (q, k, v)), attention_lse.Rule(simulated.SCORES))
    assert lse.abs().max() > 100
    for order in (range(8), reversed(range(8))):
        attention = Attention(attention_lse.cpu, q, PairShape.of(k, v))
        blocks = [Block(slice(0, 8), slice(n, n + 1), None, None) for n in order]
        attention.add(joined(k, v), blocks, attention_lse.Rule(simulated.SCORES))
        torch.testing.assert_close(attention.lse.double(), lse, rtol=1e-6, atol=1e-4)
        torch.testing.assert_close(attention.out.double(), whole, rtol=1e-3, atol=1e-3)
