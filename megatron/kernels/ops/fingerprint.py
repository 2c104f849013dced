"""A number that differs if two tensors differ in a bit, computed in one pass where the tensor lies."""

from __future__ import annotations

import torch
from torch import Tensor

_COLUMNS = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(x: Tensor) -> Tensor:
    """Returns int64 [] of a tensor's elements in their order. The host does not wait.

    The bits are read as whole numbers and added up in 64 columns, modulo 2^64, and the columns are multiplied by odd
    numbers that differ. A change of one number always shows, since no change of it is 0 modulo 2^64; changes of several
    cancel each other with a probability of 2^-64.
    """
    flat = x.detach().reshape(-1)
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()  # only whole words can be viewed as such
    per_word = 8 // flat.itemsize
    words = flat[: flat.numel() // per_word * per_word].view(torch.int64)
    tail = flat[words.numel() * per_word :].view(_INTEGERS[flat.itemsize])
    whole = words.numel() // _COLUMNS * _COLUMNS
    columns = words[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
    for left in (words[whole:], tail):
        columns[: left.numel()] += left
    # Odd multiples of an odd constant (2^64 divided by the golden ratio).
    factors = torch.arange(1, 2 * _COLUMNS, 2, device=x.device) * -7046029254386353131
    return (columns * factors).sum()
