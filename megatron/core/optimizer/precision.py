"""Stores optimizer state in less than fp32, and converts it to fp32 for an update or a checkpoint.

[Note: masters as remainders] A bf16 weight is the upper half of its fp32 master, rounded to nearest. So the lower half
r of 16 bits determines the master nearly completely (the idea of Zamirai et al., arXiv 2010.06192, and of Transformer
Engine's FusedAdam). The upper half is the bits of the weight if r < 0x8000, and these bits minus one if r > 0x8000. But
r = 0x8000 lies in the middle and was rounded to even, up or down, so an even weight has one master more than 16 bits
can tell apart. One further bit per element says which ties were rounded up. So masters are exact, and training is bit
for bit the same as with fp32 masters.

[Note: moments in bf16] The mean of gradients is rounded to nearest: a tenth of it is new in every step, well above
bf16's half step of 2^-9. Only a thousandth of the mean of squares is new in every step, which rounding to nearest would
lose. So it is rounded at random: up with a probability that equals the dropped part, so that its expectation is right.
The random bits are a hash of (parameter, global index, step). So they do not depend on the layout or on the device, and
a resumed run draws the same ones.
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
    """Memory for fp32 copies of one chunk. All chunks of one thread or stream use it, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(flat.nbytes for flat in self._flat.values())

    def take(self, key: str, size: int) -> Tensor:
        """Returns an undefined tensor [size] in fp32."""
        if key not in self._flat or len(self._flat[key]) < size:
            self._flat[key] = torch.empty(size, dtype=torch.float32, device=self._device)
        return self._flat[key][:size]


def read(stored: Mapping[str, Tensor], parameters: Tensor, take: Callable[[str, int], Tensor]) -> dict[str, Tensor]:
    """Returns moments and "master" [n] in fp32: the stored tensors, or copies in memory that `take(key, n)` returns.

    parameters: the rounded weights, or the master itself if the model is fp32 and stores none.
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
    """Stores the values of `read` that are copies. The parameters must have been rounded from the master before.

    random_bits(first, last): returns int32 [last - first] for these elements, of which 16 bits are used.
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
    """Writes the part of an fp32 master [n] that its bf16 weight does not hold.

    remainder: int16 [n]. ties: uint8 [n / 8], with one bit per element.
    """
    bits = master.view(torch.int32)
    remainder.copy_(bits)  # the lower half
    rounded_up = ((bits & 0x1FFFF) == 0x10000 + _TIE).view(-1, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=master.device)
    ties.copy_((rounded_up * weights).sum(dim=1, dtype=torch.uint8))


def join(weights: Tensor, remainder: Tensor, ties: Tensor, out: Tensor) -> Tensor:
    """Writes the masters [n] of bf16 weights to `out` in fp32, and returns it; the inverse of `split`."""
    low = remainder.to(torch.int32) & 0xFFFF
    rounded_up = (ties.unsqueeze(1) >> torch.arange(8, device=out.device, dtype=torch.uint8)) & 1
    borrow = (low > _TIE) | rounded_up.view(-1).bool()
    high = weights.view(torch.int16).to(torch.int32) - borrow.to(torch.int32)
    out.view(torch.int32).copy_((high << 16) | low)
    return out


def round_at_random(values: Tensor, random_bits: Tensor, out: Tensor) -> None:
    """Rounds fp32 [n] to one of the two neighbours in bf16; exact values stay. `random_bits` is overwritten."""
    bits = random_bits.bitwise_and_(0xFFFF).add_(values.view(torch.int32))
    out.view(torch.int16).copy_(bits.bitwise_right_shift_(16))


def random_bits(bucket: Bucket, start: int, stop: int, step: int, device: torch.device) -> Tensor:
    """Returns int32 [stop - start] for elements of this rank's slice of a bucket; see the note on moments."""
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
    """Returns the indices of elements first to last of a section in the flat global tensor, plus `key`, modulo 2^32."""
    shift = sum(start * math.prod(global_shape[dim + 1 :]) for dim, start in enumerate(section.offset)) + key
    cut = max((dim for dim, (n, whole) in enumerate(zip(section.shape, global_shape)) if n != whole), default=0)
    if math.prod(section.shape[:cut]) == 1:  # one run of the global tensor
        return torch.arange(last - first, dtype=torch.int32, device=device).add_(wrapped(first + shift))
    inner, whole = math.prod(section.shape[cut:]), math.prod(global_shape[cut:])
    local = torch.arange(first, last, device=device)
    index = local + torch.div(local, inner, rounding_mode="floor") * (whole - inner)
    return index.to(torch.int32).add_(wrapped(shift))
