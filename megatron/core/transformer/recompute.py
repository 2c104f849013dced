"""Attaches the recompute of whole regions to layers from outside: their forward does not know of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from megatron.core.recompute.rerun import Random, checkpoint


class SkipsLast(Protocol):
    """A module that can leave out its last product: the result then has undefined values, and the saved tensors are the
    same."""

    def without_gemm(self) -> AbstractContextManager[None]:
        """A context in which calls leave it out, with the communication behind it."""
        ...


def recompute(function: Callable[[Tensor], Tensor], x: Tensor, rng: Random, *, last: SkipsLast | None) -> Tensor:
    """function(x), run again in backward. The last GEMM of `last`, if given, is left out the second time: the region
    ends with this layer, and nothing that backward needs depends on its result."""
    if last is None:
        return checkpoint(function, [x], rng)

    def again(x: Tensor) -> Tensor:
        with last.without_gemm():
            return function(x)

    return checkpoint(function, [x], rng, again=again)


def recompute_module(module: nn.Module, rng: Random, *, last: SkipsLast | None) -> None:
    """From now on the module's forward, of one tensor and of arguments without a gradient,
    is recomputed in backward."""
    forward = module.forward

    def twice(x: Tensor, *arguments: Any) -> Tensor:
        return recompute(lambda x: forward(x, *arguments), x, rng, last=last)

    module.forward = twice
