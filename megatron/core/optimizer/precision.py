"""Optimizer state in less than fp32: how it is stored, and how it becomes fp32 for an update or a checkpoint.

[Note: masters as remainders]
A bf16 weight is the upper half of its fp32 master, rounded to nearest, so the lower half is nearly all that is
missing (the idea of Zamirai et al., arXiv 2010.06192, and of Transformer Engine's FusedAdam). Nearly: with r the lower 16
bits, the upper half is the weight's bits for r < 0x8000 and those less one for r > 0x8000, but r = 0x8000 lies in the
middle and was rounded to even, up or down. An even weight has one master more than 16 bits can tell apart. One further bit
an element says which ties were rounded up. So masters are exact, and training is bit for bit that with fp32 masters.

[Note: moments in bf16]
The mean of gradients is rounded to nearest: a tenth of it is new in every step, well above bf16's half step of 2^-9. Of the
mean of squares a thousandth is new: nearest rounding would keep it where it is. It is rounded at random, up with a
probability of the part that is dropped, so that its expectation is right. The random bits are a hash of (parameter, global
index, step): they do not depend on the layout, nor on who computes, and a resumed run draws the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron.core.distributed.bucket import Bucket
from megatron.core.parameter import Section
from megatron.kernels.ops.hash32 import hash32_, wrapped

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int16": torch.int16, "uint8": torch.uint8}
_TIE = 0x8000
# Elements that are rounded at a time: the work space fits a CPU core's cache, or keeps a GPU busy.
_BLOCK = {"cpu": 1 << 16, "cuda": 1 << 24}


class Scratch:
    """Memory for fp32 copies of one chunk: used by the next chunk as well, in the order of one thread or stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(flat.nbytes for flat in self._flat.values())

    def take(self, key: str, size: int) -> Tensor:
        """[size] fp32, undefined."""
        if key not in self._flat or len(self._flat[key]) < size:
            self._flat[key] = torch.empty(size, dtype=torch.float32, device=self._device)
        return self._flat[key][:size]


def read(stored: Mapping[str, Tensor], parameters: Tensor, take: Callable[[str, int], Tensor]) -> dict[str, Tensor]:
    """Moments and "master" [n] in fp32: the stored tensors themselves, or copies in memory that `take(key, n)` gives.

    parameters: the rounded weights; the master itself where the model is fp32 and none is stored.
    """
    values = {}
    for key, tensor in stored.items():
        if tensor.dtype == torch.float32:
            values[key] = tensor
        elif tensor.dtype == torch.bfloat16:
            values[key] = take(key, len(tensor)).copy_(tensor)
    if "remainder" in stored:
        values["master"] = join(parameters, stored["remainder"], stored["ties"], take("master", len(parameters)))
    elif "master" not in stored:
        values["master"] = parameters
    return values


def write(
    stored: Mapping[str, Tensor], values: Mapping[str, Tensor], random_bits: Callable[[int, int], Tensor]
) -> None:
    """Inverse of `read`, where that made copies. The parameters have been rounded from the master before.

    random_bits(first, last): int32 [last - first] for these elements, of which 16 bits are used.
    """
    for key, tensor in stored.items():
        if tensor.dtype != torch.bfloat16:
            continue
        if key == "exp_avg_sq":
            block = _BLOCK[tensor.device.type]
            for first in range(0, len(tensor), block):
                last = min(first + block, len(tensor))
                round_at_random(values[key][first:last], random_bits(first, last), tensor[first:last])
        else:
            tensor.copy_(values[key])
    if "remainder" in stored:
        split(values["master"], stored["remainder"], stored["ties"])


def split(master: Tensor, remainder: Tensor, ties: Tensor) -> None:
    """What a bf16 weight lacks of its fp32 master [n]: int16 [n], and uint8 [n / 8] with one bit an element."""
    bits = master.view(torch.int32)
    remainder.copy_(bits)  # the lower half
    rounded_up = ((bits & 0x1FFFF) == 0x10000 + _TIE).view(-1, 8)
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=master.device)
    ties.copy_((rounded_up * weights).sum(dim=1, dtype=torch.uint8))


def join(weights: Tensor, remainder: Tensor, ties: Tensor, out: Tensor) -> Tensor:
    """The masters, in `out`."""
    low = remainder.to(torch.int32) & 0xFFFF
    rounded_up = (ties.unsqueeze(1) >> torch.arange(8, device=out.device, dtype=torch.uint8)) & 1
    borrow = (low > _TIE) | rounded_up.view(-1).bool()
    high = weights.view(torch.int16).to(torch.int32) - borrow.to(torch.int32)
    out.view(torch.int32).copy_((high << 16) | low)
    return out


def round_at_random(values: Tensor, random_bits: Tensor, out: Tensor) -> None:
    """fp32 [n] -> bf16, to one of the two neighbours; exact values stay. `random_bits` is overwritten."""
    bits = random_bits.bitwise_and_(0xFFFF).add_(values.view(torch.int32))
    out.view(torch.int16).copy_(bits.bitwise_right_shift_(16))


def random_bits(bucket: Bucket, start: int, stop: int, step: int, device: torch.device) -> Tensor:
    """int32 [stop - start] for elements of this rank's slice of a bucket; see the note on moments."""
    bits = torch.zeros(stop - start, dtype=torch.int32, device=device)
    for piece in bucket.pieces:
        first, last = max(start, piece.at), min(stop, piece.at + piece.stop - piece.start)
        if first < last:
            key = int.from_bytes(hashlib.sha256(f"{step}/{piece.name}".encode()).digest()[:4], "little")
            begin = piece.start + first - piece.at
            shape, section = bucket.parameters[piece.name].info.spec.shape, bucket.section_of(piece)
            begin -= section.start
            index = _global_index(shape, section, begin, begin + last - first, key, device)
            bits[first - start : last - start] = hash32_(index)
    return bits


def _global_index(
    global_shape: tuple[int, ...], section: Section, first: int, last: int, key: int, device: torch.device
) -> Tensor:
    """Places in the flattened global tensor of elements first .. last of the section, plus `key`; modulo 2^32."""
    shift = sum(start * math.prod(global_shape[dim + 1 :]) for dim, start in enumerate(section.offset)) + key
    cut = max((dim for dim, (n, whole) in enumerate(zip(section.shape, global_shape)) if n != whole), default=0)
    if math.prod(section.shape[:cut]) == 1:  # one run of the global tensor
        return torch.arange(last - first, dtype=torch.int32, device=device).add_(wrapped(first + shift))
    inner, whole = math.prod(section.shape[cut:]), math.prod(global_shape[cut:])
    local = torch.arange(first, last, device=device)
    index = local + torch.div(local, inner, rounding_mode="floor") * (whole - inner)
    return index.to(torch.int32).add_(wrapped(shift))
