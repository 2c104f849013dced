"""Attaches the recompute of whole regions to layers from outside: their forward does not know of it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from megatron.core.recompute.rerun import Random, checkpoint
from megatron.core.tensor_parallel.linear import RowParallelLinear


def recompute(
    function: Callable[[Tensor], Tensor], x: Tensor, rng: Random, *, last: RowParallelLinear | None
) -> Tensor:
    """function(x), run again in backward. The GEMM of `last`, if given, is left out the second time: the region ends with
    this layer, and nothing that backward needs depends on its result."""
    if last is None:
        return checkpoint(function, [x], rng)

    def again(x: Tensor) -> Tensor:
        with last.without_gemm():
            return function(x)

    return checkpoint(function, [x], rng, again=again)


def recompute_module(module: nn.Module, rng: Random, *, last: RowParallelLinear) -> None:
    """From now on the module's forward, of one tensor, is recomputed in backward."""
    forward = module.forward
    module.forward = lambda x: recompute(forward, x, rng, last=last)
