"""Activation recompute: a region of the forward saves only its inputs, and runs again in backward.

Chen et al., arXiv 1604.06174. As in PyTorch's non-reentrant checkpoint, the graph is the one of a forward without
regions: only the tensors that its nodes saved are replaced by handles, and the second run provides them. So a gradient
takes the same path, hooks of parameters and modules fire where they always do, and weight gradients may be deferred.

[Note: the second run] It saves as many tensors as the first run, in the same order, because it has the same inputs,
parameters and random numbers. It starts when backward first reads one of them, on the stream of the node that reads it
(autograd runs a node on the stream of its forward), and ends with the last saved tensor, so the rest of the region is
not run again. Each tensor is handed out once, so memory is freed as backward proceeds through the region. Communication
of the region is repeated; all ranks of a group repeat it at the same point, because their graphs are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")
Restore = Callable[..., Sequence[Tensor]]


class Random(Protocol):
    """Streams of random numbers (core/tensor_parallel/random.py)."""

    def snapshot(self) -> dict[str, Tensor]:
        """The present state of the streams."""
        ...

    def replay(self, snapshot: dict[str, Tensor]) -> AbstractContextManager[None]:
        """A context in which the streams start from the snapshot; afterwards their state is restored."""
        ...


def checkpoint(
    function: Callable[..., T],
    inputs: Sequence[Tensor],
    rng: Random,
    *,
    source: tuple[Restore, Sequence[Tensor]] | None = None,
    again: Callable[..., T] | None = None,
) -> T:
    """Compute `function(*inputs)` and save only the inputs for backward.

    Random numbers must come from streams of `rng`. `source`: save these tensors instead of the inputs; the callable
    restores the inputs from them, bit for bit, and is not differentiated. `again`: the function of the second run; it
    saves the same tensors, and may skip computations that only the result needs. Without gradients, only call the
    function.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    restore, saved = source or (None, inputs)
    region = _Region(again or function, inputs, saved, restore, rng)
    with saved_tensors_hooks(region.pack, _Handle.tensor):
        return function(*inputs)


class RecomputedOutputs:
    """A region whose outputs are computed again, too, for the nodes behind it that save them.

    outputs: of the function. Within `dropped` such a node saves a handle instead of an output; the memory is free when
    the caller's own references have gone.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], rng: Random) -> None:
        """Computes `outputs`, and saves the inputs for backward. See `checkpoint`; gradients are wanted."""
        self._region = _Region(function, inputs, inputs, None, rng, returns=True)
        with saved_tensors_hooks(self._region.pack, _Handle.tensor):
            self.outputs = function(*inputs)

    @contextmanager
    def dropped(self) -> Iterator[None]:
        """In the body saved tensors in the memory of an output are replaced by handles. Forgets the outputs."""
        numbers = {output.untyped_storage()._cdata: number for number, output in enumerate(self.outputs)}
        self.outputs = ()

        def pack(tensor: Tensor) -> Tensor | _Handle:
            number = numbers.get(tensor.untyped_storage()._cdata)
            return tensor if number is None else self._region.pack_output(number, tensor)

        with saved_tensors_hooks(pack, lambda saved: saved.tensor() if isinstance(saved, _Handle) else saved):
            yield


@dataclass(frozen=True)
class _View:
    """A tensor in the memory of output number `output`."""

    output: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Region:
    """The tensors that one run of a function saved, and its second run."""

    def __init__(
        self,
        again: Callable[..., Any],
        inputs: Sequence[Tensor],
        kept: Sequence[Tensor],
        restore: Restore | None,
        rng: Random,
        *,
        returns: bool = False,
    ) -> None:
        """returns: the second run goes on to the end, because its outputs are needed."""
        self._second_run, self._restore, self._returns = again, restore, returns
        self._differentiable = [x.requires_grad for x in inputs]
        self._rng, self._random = rng, rng.snapshot()
        # Its node holds the tensors. The result itself is kept: torch 2.11 frees what the node saved together with it.
        self._kept: Tensor | None = _Keep.apply(torch.empty(0, requires_grad=True), *kept)
        self._saved = 0  # tensors
        self._views: list[_View] = []  # of outputs, which nodes behind the region saved
        self._again: dict[int, Tensor] | None = None

    def pack(self, tensor: Tensor) -> _Handle:
        """Replace a tensor that the first run saves by a handle."""
        self._saved += 1
        return _Handle(self, self._saved - 1)

    def pack_output(self, output: int, tensor: Tensor) -> _Handle:
        """Replace a tensor in the memory of an output, which a node behind the region saves, by a handle."""
        self._views.append(_View(output, tensor.shape, tensor.stride(), int(tensor.storage_offset())))
        return _Handle(self, -len(self._views))

    def take(self, number: int) -> Tensor:
        """The saved tensor of this number; the first view of an output has -1. May be called once per number."""
        if self._again is None:
            self._again = {}
            self._run_again(self._again)
        assert number in self._again, f"tensor {number} of {self._saved} of a recomputed region is read twice"
        return self._again.pop(number)

    def _run_again(self, tensors_by_number: dict[int, Tensor]) -> None:
        def keep(tensor: Tensor) -> None:
            # Without its history: only values of the second run are needed.
            tensors_by_number[len(tensors_by_number)] = tensor.detach()
            if len(tensors_by_number) == self._saved and not self._returns:
                raise _Complete

        assert self._kept is not None
        node: Any = self._kept.grad_fn
        tensors, self._kept = node.saved_tensors, None
        if self._restore is not None:
            with torch.no_grad():
                tensors = self._restore(*tensors)
        inputs = [x.detach().requires_grad_(needs) for x, needs in zip(tensors, self._differentiable, strict=True)]
        try:
            with torch.enable_grad(), self._rng.replay(self._random), saved_tensors_hooks(keep, _never):
                outputs = self._second_run(*inputs)
        except _Complete:
            return
        if not self._returns or len(tensors_by_number) != self._saved:
            count = len(tensors_by_number)
            raise AssertionError(f"a region saved {self._saved} tensors, and {count} when it ran again")
        for number, view in enumerate(self._views, start=1):
            output = outputs[view.output].detach()
            tensors_by_number[-number] = output.as_strided(view.shape, view.stride, view.offset)


class _Handle:
    """Stands for a saved tensor in a node of the graph."""

    __slots__ = ("_number", "_region")

    def __init__(self, region: _Region, number: int) -> None:
        self._region, self._number = region, number

    def tensor(self) -> Tensor:
        """The saved tensor."""
        return self._region.take(self._number)


class _Keep(torch.autograd.Function):
    """Saves tensors as any node does, so that activation offload finds them. Has no backward.

    The first argument requires a gradient, so that there is a node even if the others do not.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


class _Complete(Exception):
    """The second run has saved as many tensors as the first one."""


def _never(value: None) -> Tensor:
    raise AssertionError("the graph of a second run is not differentiated")
