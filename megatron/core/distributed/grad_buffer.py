"""Flat buffers that hold a model's parameters and fp32 gradients, cut into buckets.

[Note: layout of a buffer]
Parameters lie in the expected order of their gradients in backward: the reverse of registration. A bucket is a run of
whole parameters of at least `bucket_size` elements, padded to a multiple of lcm(dp, 128) and so cut into dp equal slices:
slice r of every bucket belongs to dp rank r, and reduce-scatter and all-gather of a bucket are in place and of full size.
Every parameter starts on a multiple of 64 elements (cuBLAS and vector units want aligned outputs). Padding is always zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.comm.collectives import Handle, all_reduce, all_reduce_async
from megatron.core.groups import Group
from megatron.core.parameter import GradSlot, Parameter

_ALIGN = 64
_BUCKET_ALIGN = 128


@dataclass(frozen=True)
class Bucket:
    """Elements [start, end) of the buffer and the parameters that lie there."""

    start: int
    end: int
    names: tuple[str, ...]


def plan_buckets(numels: dict[str, int], bucket_size: int, dp: int) -> tuple[list[Bucket], dict[str, int]]:
    """(buckets, parameter name -> offset) for parameters in buffer order. Pure; see the note on layout."""
    buckets: list[Bucket] = []
    offsets: dict[str, int] = {}
    start = end = 0
    names: list[str] = []
    step = math.lcm(dp, _BUCKET_ALIGN)
    for name, numel in numels.items():
        offsets[name] = _round_up(end, _ALIGN)
        end = offsets[name] + numel
        names.append(name)
        if end - start >= bucket_size:
            end = start + _round_up(end - start, step)
            buckets.append(Bucket(start, end, tuple(names)))
            start, names = end, []
    if names:
        end = start + _round_up(end - start, step)
        buckets.append(Bucket(start, end, tuple(names)))
    return buckets, offsets


class GradBuffer:
    """Owns the memory of parameters of one dtype: `params` in their dtype, `grads` in fp32, both flat.

    Every parameter becomes a view of `params` and gets a GradSlot on its piece of `grads`.
    """

    def __init__(self, parameters: dict[str, Parameter], *, dp: Group, tp: Group, bucket_size: int) -> None:
        """`dp` is the group that gradients are summed over (dp x cp for dense parameters)."""
        self.parameters = dict(reversed(parameters.items()))
        self.buckets, self.offsets = plan_buckets(
            {name: parameter.numel() for name, parameter in self.parameters.items()}, bucket_size, dp.size
        )
        first = next(iter(self.parameters.values()))
        size = self.buckets[-1].end
        self.params = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(size, dtype=torch.float32, device=first.device)
        self._dp, self._tp = dp, tp
        for name, parameter in self.parameters.items():
            view = self.slice_of(self.params, name)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.slot = GradSlot(self.slice_of(self.grads, name))
            # For gradients that autograd itself accumulates (norm weights, biases): move them into the slot.
            parameter.register_post_accumulate_grad_hook(_move_to_slot)

    def slice_of(self, flat: Tensor, name: str) -> Tensor:
        """The piece of `flat` (a tensor of the buffer's size) that belongs to a parameter, in its shape."""
        parameter, start = self.parameters[name], self.offsets[name]
        return flat[start : start + parameter.numel()].view(parameter.shape)

    def clear(self) -> None:
        """Forget all gradients; the next writer of each slot overwrites."""
        for parameter in self.parameters.values():
            assert parameter.slot is not None
            parameter.slot.fresh = True

    def reduce(self) -> None:
        """Sum gradients over dp (and over tp where the parameter asks for it), bucket by bucket, after the backward.

        Communication: one all-reduce of the small tp-partial gradients, then one all-reduce a bucket, all in flight
        together and in one fixed order on all ranks.
        """
        for parameter in self.parameters.values():
            if parameter.slot is not None and parameter.slot.fresh:  # no gradient this step: its share is zero
                parameter.slot.main_grad.zero_()
        self._sum_over_tp()
        handles: list[Handle] = [all_reduce_async(self.grads[b.start : b.end], self._dp) for b in self.buckets]
        for handle in handles:
            handle.wait()

    def _sum_over_tp(self) -> None:
        partial = [name for name, parameter in self.parameters.items() if parameter.info.sum_over_tp]
        if not partial:
            return
        together = torch.cat([self.slice_of(self.grads, name).flatten() for name in partial])
        all_reduce(together, self._tp)
        pieces = together.split([self.parameters[name].numel() for name in partial])
        for name, piece in zip(partial, pieces, strict=True):
            self.slice_of(self.grads, name).copy_(piece.view(self.parameters[name].shape))


def build_buffers(
    parameters: dict[str, Parameter], *, dp: Group, tp: Group, bucket_size: int | None
) -> list[GradBuffer]:
    """One buffer a parameter dtype. The default bucket grows with dp, so that slices stay large enough for the wire."""
    size = bucket_size or max(40_000_000, 1_000_000 * dp.size)
    dtypes = dict.fromkeys(parameter.dtype for parameter in parameters.values())
    return [
        GradBuffer({n: p for n, p in parameters.items() if p.dtype == dtype}, dp=dp, tp=tp, bucket_size=size)
        for dtype in dtypes
    ]


def _move_to_slot(parameter: Tensor) -> None:
    assert isinstance(parameter, Parameter) and parameter.slot is not None
    if parameter.grad is not None:  # it is None when the layer's backward wrote to the slot itself
        parameter.slot.add(parameter.grad)
        parameter.grad = None


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
