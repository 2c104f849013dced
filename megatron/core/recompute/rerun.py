"""Activation recompute: a region of the forward keeps its inputs alone and runs again when backward comes to it.

Chen et al., arXiv 1604.06174. As in PyTorch's non-reentrant checkpoint, the graph is the one of a forward without
regions: only what its nodes saved is exchanged for tickets, and the second run fills them. So a gradient takes the same
path, hooks of parameters and modules fire where they always do, and weight gradients may be put off.

[Note: the second run]
It saves as many tensors as the first did, in the same order: it has the same inputs, parameters and random numbers. It
begins when backward first asks for one of them, on the stream of the node that asks (autograd runs a node on the stream of
its forward), and ends with the last one, so what follows in the region is not run again. Each is handed out once: memory
goes as backward goes through the region. Communication of the region is repeated; all ranks of a group repeat it at the
same place, as their graphs are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")
Restore = Callable[..., Sequence[Tensor]]


class Random(Protocol):
    """Streams of random numbers (core/tensor_parallel/random.py)."""

    def snapshot(self) -> dict[str, Tensor]:
        """Where the streams are now."""
        ...

    def replay(self, snapshot: dict[str, Tensor]) -> AbstractContextManager[None]:
        """Within it they start from there; afterwards they are where they were."""
        ...


def checkpoint(
    function: Callable[..., T],
    inputs: Sequence[Tensor],
    rng: Random,
    *,
    source: tuple[Restore, Sequence[Tensor]] | None = None,
    again: Callable[..., T] | None = None,
) -> T:
    """`function(*inputs)`, which keeps nothing for backward but the inputs; without gradients simply that.

    Random numbers have to come from streams of `rng`. `source`: keep these tensors instead, from which the callable makes
    the inputs again, bit for bit; it is not differentiated. `again`: runs the second time; saves the same, and may skip
    what only the result needs.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    restore, kept = source or (None, inputs)
    region = _Region(again or function, inputs, kept, restore, rng)
    with saved_tensors_hooks(region.pack, _Ticket.redeem):
        return function(*inputs)


class _Region:
    """What one run of a function saved, and its second run."""

    def __init__(
        self,
        again: Callable[..., Any],
        inputs: Sequence[Tensor],
        kept: Sequence[Tensor],
        restore: Restore | None,
        rng: Random,
    ) -> None:
        self._second_run, self._restore = again, restore
        self._differentiable = [x.requires_grad for x in inputs]
        self._rng, self._random = rng, rng.snapshot()
        self._kept = _Keep.apply(torch.empty(0, requires_grad=True), *kept).grad_fn
        self._saved = 0  # tensors
        self._again: dict[int, Tensor] | None = None

    def pack(self, tensor: Tensor) -> _Ticket:
        """Of the first run: a saved tensor is forgotten."""
        self._saved += 1
        return _Ticket(self, self._saved - 1)

    def take(self, number: int) -> Tensor:
        """What the first run saved as its tensor of this number, once."""
        if self._again is None:
            self._again = {}
            self._run_again(self._again)
        assert number in self._again, f"tensor {number} of {self._saved} of a recomputed region is asked for twice"
        return self._again.pop(number)

    def _run_again(self, found: dict[int, Tensor]) -> None:
        def keep(tensor: Tensor) -> None:
            # Without its history: of the second run only values are needed.
            found[len(found)] = tensor.detach()
            if len(found) == self._saved:
                raise _Complete

        assert self._kept is not None
        tensors, self._kept = self._kept.saved_tensors, None
        if self._restore is not None:
            with torch.no_grad():
                tensors = self._restore(*tensors)
        inputs = [x.detach().requires_grad_(needs) for x, needs in zip(tensors, self._differentiable, strict=True)]
        try:
            with torch.enable_grad(), self._rng.replay(self._random), saved_tensors_hooks(keep, _never):
                self._second_run(*inputs)
        except _Complete:
            return
        raise AssertionError(f"a region saved {self._saved} tensors, and {len(found)} when it ran again")


class _Ticket:
    """What a node of the graph holds in place of a tensor it saved."""

    __slots__ = ("_number", "_region")

    def __init__(self, region: _Region, number: int) -> None:
        self._region, self._number = region, number

    def redeem(self) -> Tensor:
        """The tensor."""
        return self._region.take(self._number)


class _Keep(torch.autograd.Function):
    """Saves tensors as any node does, so that what moves saved tensors elsewhere finds them. Has no backward.

    The first argument requires a gradient, so that there is a node even if the others do not.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


class _Complete(Exception):
    """The second run has saved all that the first one did."""


def _never(kept: None) -> Tensor:
    raise AssertionError("the graph of a second run is not differentiated")
