"""A bucket: parameters whose gradients are reduced together, and whose values are updated and gathered together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from megatron.core.distributed.grad_rounding import GradRounding
from megatron.core.groups import View
from megatron.core.offload.weights import OffloadedShard, WeightOffload
from megatron.core.parameter import GradSlot, Parameter, ParamInfo, Section
from megatron.core.streams.stream import Work
from megatron.kernels.ops.random_rounding import round_in_blocks, section_bits
from megatron.spec.buckets import ALIGN, BucketLayout, Piece, owned_pieces, round_up

K = TypeVar("K", bound=Hashable)


class Bucket:
    """The flat memory of consecutive parameters, and this rank's slice of it.

    whole [size]: values in the parameters' dtype; every parameter is a view of it. After `shard_params` it exists only
    between `unshard` and `reshard`, and parameters are empty otherwise.
    param_shard [size / shards]: this rank's slice, which its optimizer updates. It is a view of `whole` or, after
    `shard_params`, the only copy, in host memory if the bucket is `offloaded`.
    grads [size]: the memory to which every parameter's slot writes its gradient. It is kept for the whole run in
    `grad_dtype`, fp32 or bf16, or, after `keep_grads(False)`, taken in fp32 from `take` when the first gradient is
    written, and handed over with `detach` to be reduced.
    grad_shard [size / shards] in `grad_dtype`: this rank's slice of the reduced gradient: a view of `grads` when those
    are kept.
    pieces: the parts of parameters in this rank's slice, in order; each lies within one section of its parameter.
    """

    def __init__(
        self,
        index: int,
        parameters: dict[str, Parameter],
        layout: BucketLayout,
        *,
        view: View,
        take: Callable[[int], Tensor],
        stage: int | None = 0,
        grad_dtype: torch.dtype = torch.float32,
    ) -> None:
        """view: the same for all parameters of the bucket; its `shard` group determines which slice this rank owns.
        `take(n)` returns a block of fp32 memory of at least n elements. stage: the pipeline stage whose backward
        completes the bucket; None if several do.
        """
        self.index, self.parameters, self.layout, self.stage = index, parameters, layout, stage
        pieces = owned_pieces(layout, view.shard.rank, view.shard.size)
        self.pieces = [part for piece in pieces for part in self._by_section(piece)]
        self.missing = 0  # gradients that this backward pass has not computed yet
        self.view, self._take = view, take
        self._shard_is_fresh = True
        first = next(iter(parameters.values()))
        self.dtype, self.device = first.dtype, first.device
        self.grad_dtype, self.rounding = grad_dtype, GradRounding(view.copies.rank)
        self._is_sharded = False
        self._whole: Tensor | None = torch.zeros(layout.size, dtype=self.dtype, device=self.device)
        self.param_shard = self._own(self._whole)
        self.offloaded: OffloadedShard | None = None
        self.grads: Tensor | None = None
        self._block: Tensor | None = None
        self.grad_shard = torch.empty(0)
        for name, parameter in parameters.items():
            memory = self.view_of(self._whole, name)
            memory.copy_(parameter.detach())
            parameter.data = memory
            parameter.slot = GradSlot(self._open, functools.partial(self.rounding.round, name, parameter.info))

    @property
    def label(self) -> str:
        """The name of the bucket in timelines."""
        return f"bucket {self.index}"

    @property
    def on_both_ends(self) -> bool:
        """Whether another pipeline rank has the same parameters; then the bucket holds no others."""
        return any(parameter.info.on_both_ends for parameter in self.parameters.values())

    @property
    def size(self) -> int:
        """The number of elements, padding included."""
        return self.layout.size

    @property
    def shards(self) -> int:
        """The number of slices."""
        return self.view.shard.size

    def view_of(self, flat: Tensor, name: str) -> Tensor:
        """Returns the part of `flat` [size] that belongs to a parameter, in the parameter's shape."""
        start, numel = self.layout.offsets[name], self.layout.numels[name]
        return flat[start : start + numel].view(self.parameters[name].info.shape)

    def section_of(self, piece: Piece) -> Section:
        """Returns the section of the parameter to which the elements of the piece belong. No piece lies in two
        sections."""
        return self.parameters[piece.name].info.section_at(piece.start)

    def runs(self, key: Callable[[ParamInfo, Section], K]) -> list[tuple[int, int, K]]:
        """Returns this rank's slice as (start, stop, key): the longest runs of pieces with the same key.

        Alignment padding belongs to the parameter before it, and slices without a parameter are left out. So runs
        consist of whole rows of 64 elements, unless one ends between two sections of a parameter.
        """
        runs: list[tuple[int, int, K]] = []
        for piece in self.pieces:
            value = key(self.parameters[piece.name].info, self.section_of(piece))
            start, stop = piece.at, piece.at + piece.stop - piece.start
            if piece.stop == self.layout.numels[piece.name]:
                stop = round_up(stop, ALIGN)
            if runs and runs[-1][1:] == (start, value):
                start = runs.pop()[0]
            runs.append((start, stop, value))
        return runs

    def random_bits(self, key: str, device: torch.device, start: int, stop: int) -> Tensor:
        """Returns int32 [stop - start] of random bits for elements of this rank's slice: a hash of the key, the
        parameter and the global index, and zeros for padding."""
        bits = torch.zeros(stop - start, dtype=torch.int32, device=device)
        for piece in self.pieces:
            first, last = max(start, piece.at), min(stop, piece.at + piece.stop - piece.start)
            if first < last:
                section, shape = self.section_of(piece), self.parameters[piece.name].info.spec.shape
                begin = piece.start + first - piece.at - section.start
                bits[first - start : last - start] = section_bits(
                    f"{key}/{piece.name}", shape, section, device, begin, begin + last - first
                )
        return bits

    @property
    def whole(self) -> Tensor:
        """The parameters [size]; see the class."""
        assert self._whole is not None
        return self._whole

    @property
    def storage(self) -> Tensor:
        """The memory that this rank has between steps: `whole`, or after `shard_params` `param_shard`."""
        return self.param_shard if self._is_sharded else self.whole

    def write_back(self) -> None:
        """Copies this rank's slice of `whole`, which was written, to `storage`, from which no copy is under way."""
        if self._is_sharded:
            self.param_shard.copy_(self._own(self.whole))

    def parameter_at(self, offset: int) -> Parameter | None:
        """The parameter that owns this element of `whole`; None for padding."""
        for name, start in self.layout.offsets.items():
            if start <= offset < start + self.layout.numels[name]:
                return self.parameters[name]
        return None

    def shard_params(self, offload: WeightOffload | None = None) -> None:
        """Keeps only this rank's slice of the parameters from now on, on the device or offloaded to host memory."""
        if offload is None:
            self.param_shard = self._own(self.whole).clone()
        else:
            self.offloaded = offload.offload(self.label, self.param_shard)
            self.param_shard = self.offloaded.shard
        self._is_sharded = True
        self.reshard()

    def unshard(self) -> Work | None:
        """Allocates `whole` with this rank's slice in it, so that the others can be gathered; parameters become views
        of it.

        Returns the copy of the slice from host memory if the bucket is offloaded; the slice is valid after it.
        """
        self._whole = torch.empty(self.size, dtype=self.dtype, device=self.device)
        for name, parameter in self.parameters.items():
            parameter.data = self.view_of(self._whole, name)
        shard = self._own(self._whole)
        if self.offloaded is not None:
            return self.offloaded.to_device(shard)
        shard.copy_(self.param_shard)
        return None

    def reshard(self) -> None:
        """Frees `whole`; parameters become empty."""
        self._whole = None
        for parameter in self.parameters.values():
            parameter.data = torch.empty(0, dtype=self.dtype, device=self.device)

    def keep_grads(self, keep: bool) -> None:
        """Keeps the whole gradient from now on, or only this rank's slice. Only between steps."""
        if keep:
            self.grads = torch.zeros(self.size, dtype=self.grad_dtype, device=self.device)
            self.grad_shard = self._own(self.grads)
            self._bind(self.grads)
        else:
            self.grads = None
            for parameter in self.parameters.values():
                assert parameter.slot is not None
                parameter.slot.main_grad = None
            self.grad_shard = torch.zeros(self.size // self.shards, dtype=self.grad_dtype, device=self.device)

    def clear(self) -> None:
        """Clears the gradient: the next writer overwrites it."""
        self._shard_is_fresh = True
        for parameter in self.parameters.values():
            assert parameter.slot is not None
            parameter.slot.fresh = True

    def fill_missing(self) -> list[str]:
        """Sets the gradients that were not written to zero. Returns the names of their parameters."""
        without = []
        for name, parameter in self.parameters.items():
            assert parameter.slot is not None
            if parameter.slot.fresh:
                parameter.slot.main_grad.zero_()
                without.append(name)
        return without

    def detach(self) -> Tensor:
        """Hands over the block of gradient memory. The gradient is cleared, and its next writer takes a new block."""
        self.grads = None
        for parameter in self.parameters.values():
            assert parameter.slot is not None
            parameter.slot.main_grad = None
            parameter.slot.fresh = True
        block, self._block = self._block, None
        assert block is not None
        return block

    def accumulate(self, block: Tensor) -> None:
        """Adds this rank's slice of a detached and reduced gradient to `grad_shard`."""
        shard = self._own(block[: self.size])
        if self.grad_dtype != torch.float32:
            total = shard if self._shard_is_fresh else shard.add_(self.grad_shard)
            key = self.rounding.key(self.label)
            round_in_blocks(total, self.grad_shard, functools.partial(self.random_bits, key, self.device))
        elif self._shard_is_fresh:
            self.grad_shard.copy_(shard)
        else:
            self.grad_shard.add_(shard)
        self._shard_is_fresh = False

    def _open(self) -> None:
        """Takes gradient memory for this backward pass."""
        self._block = self._take(self.size)
        self.grads = self._block[: self.size]
        end = 0
        for name, start in self.layout.offsets.items():
            self.grads[end:start].zero_()  # padding: the memory was another bucket's
            end = start + self.layout.numels[name]
        self.grads[end:].zero_()
        self._bind(self.grads)

    def _bind(self, grads: Tensor) -> None:
        for name, parameter in self.parameters.items():
            assert parameter.slot is not None
            parameter.slot.main_grad = self.view_of(grads, name)

    def _by_section(self, piece: Piece) -> Iterator[Piece]:
        """Returns the piece, split where a section of the parameter ends."""
        for section in self.parameters[piece.name].info.sections:
            start, stop = max(piece.start, section.start), min(piece.stop, section.start + section.numel)
            if start < stop:
                yield Piece(piece.name, start, stop, piece.at + start - piece.start)

    def _own(self, flat: Tensor) -> Tensor:
        return self.view.own(flat)
