"""A residual stream whose additions wait for the norm behind them gives the numbers of one that is added at once."""

import dataclasses
import weakref

import pytest
import torch

from megatron.core.parameter import initialize, local_parameters
from megatron.core.transformer.block import TransformerBlock
from megatron.core.transformer.context import Positions
from megatron.core.transformer.norm import NoNorm
from megatron.core.transformer.residual import Residual, total
from megatron.kernels.ops import norm
from tests import pool
from tests.unit.models.builds import GPT, make_build, spread_constants

NOWHERE = Positions((), None)
RMS = {**GPT, "normalization": "RMSNorm", "add_bias_linear": False}
ONE_NORM = {**RMS, "parallel_residual": True, "shared_norm": True}


def block_of(fields, sums=None, **options):
    """Two layers with a final norm. sums: gets references to both terms that each norm adds, or None for plain
    norms."""
    build = make_build(fields, pool.groups(), **options)
    if sums is not None:

        def compute(x, branch, *rest):
            sums.append((weakref.ref(x), weakref.ref(branch)))
            return norm.compute_add_norm(x, branch, *rest)

        kernel = norm.separate._replace(residual=norm.ResidualNorm(compute, norm.gradient_add_norm))
        fused = build.kernels.fused._replace(norm=kernel)
        build = dataclasses.replace(build, kernels=dataclasses.replace(build.kernels, fused=fused))
    block = TransformerBlock(build, range(2), final_norm=True)
    initialize(local_parameters(block), 3)
    spread_constants(local_parameters(block), 0.3)
    return block


def differentiated(block, *, final_norm=True):
    """The output and all gradients, by name."""
    x = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = block(x, NOWHERE, layers=range(2), final_norm=final_norm)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    return {"out": out.detach(), "x": x.grad, **{n: p.grad for n, p in block.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize(
    "fields",
    [
        GPT,
        {**GPT, "norm_parameters": "none"},
        RMS,
        {**RMS, "post_norm": True},
        {**RMS, "parallel_residual": True},
        ONE_NORM,
    ],
    ids=["layer norm", "no parameters", "rms norm", "sandwich", "parallel", "one norm"],
)
@pytest.mark.parametrize("final_norm", [True, False])
def test_sums_in_norms_change_no_number(fields, final_norm):
    sums = []
    fused, plain = (differentiated(block_of(fields, s), final_norm=final_norm) for s in (sums, None))
    assert fused.keys() == plain.keys()
    for name, expected in plain.items():
        torch.testing.assert_close(fused[name], expected, rtol=1e-5, atol=1e-6)
    # Of four additions; the first norm reads the input of the block, and in parallel layers no norm reads attention's.
    assert len(sums) == (1 if "parallel_residual" in fields else 3) + final_norm


def test_a_stream_without_norms_before_the_layers_is_added_at_once():
    sums = []
    fields = {**RMS, "pre_norm": False, "post_norm": True}
    block = block_of(fields, sums)
    assert isinstance(block.layers["0"].input_layernorm, NoNorm)
    plain = differentiated(block_of(fields))
    for name, value in differentiated(block).items():
        torch.testing.assert_close(value, plain[name], rtol=1e-5, atol=1e-6)
    assert len(sums) == 1, "the final norm is the only one that reads the stream"


def test_the_terms_of_a_sum_are_freed_before_attention():
    sums, alive = [], []
    block = block_of(RMS, sums)
    block.layers["1"].self_attention.register_forward_pre_hook(
        lambda *_: alive.append([term() is not None for term in sums[-1]])
    )
    with torch.no_grad():
        block(torch.randn(6, 2, 32), NOWHERE, layers=range(2), final_norm=False)
    assert alive == [[False, False]]


def test_an_addition_is_computed_once():
    x, first, second = (torch.full((2, 1, 3), value) for value in (1.0, 10.0, 100.0))
    stream = Residual(x) + first
    assert stream.is_pending and total(stream).equal(x + first) and not stream.is_pending
    assert total(stream + second).equal(x + first + second) and total(stream).equal(x + first)


def test_a_norm_reads_both_parts():
    stream = Residual(torch.ones(2)) + torch.full((2,), 4.0)
    assert stream.added_by(lambda x, pending: (x + pending, x - pending)).tolist() == [-3.0, -3.0]
    assert total(stream).tolist() == [5.0, 5.0] and not stream.is_pending


def test_a_mark_stands_where_backward_begins():
    """At the pending addition, whose gradient is complete before that of the stream."""
    marked = []

    def mark(tensor):
        marked.append(tensor)
        return tensor.view_as(tensor)

    x, branch = torch.ones(2), torch.full((2,), 4.0)
    assert total((Residual(x) + branch).marked(mark)).tolist() == [5.0, 5.0]
    assert total(Residual(x).marked(mark)).tolist() == [1.0, 1.0]
    assert [id(tensor) for tensor in marked] == [id(branch), id(x)]
