"""Stores optimizer state in less than fp32, and converts it to fp32 for an update or a checkpoint.

[Note: masters as remainders] A bf16 weight is the upper half of its fp32 master, rounded to nearest. So the lower half
r of 16 bits determines the master nearly completely (the idea of Zamirai et al., arXiv 2010.06192, and of Transformer
Engine's FusedAdam). The upper half is the bits of the weight if r < 0x8000, and these bits minus one if r > 0x8000. But
r = 0x8000 lies in the middle and was rounded to even, up or down, so an even weight has one master more than 16 bits
can tell apart. One further bit per element says which ties were rounded up. So masters are exact, and training is bit
for bit the same as with fp32 masters.

[Note: moments in bf16] The mean of gradients is rounded to nearest: a tenth of it is new in every step, well above
bf16's half step of 2^-9. Only a thousandth of the mean of squares is new in every step, which rounding to nearest would
lose. So it is rounded at random (kernels/ops/random_rounding.py). The random bits are a hash of (parameter, global
index, step). So they do not depend on the layout or on the device, and a resumed run draws the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron.kernels.ops.random_rounding import round_in_blocks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int16": torch.int16, "uint8": torch.uint8}
_TIE = 0x8000


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
            round_in_blocks(values[key], tensor, random_bits)
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
