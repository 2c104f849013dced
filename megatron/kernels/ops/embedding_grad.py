"""The gradient of an embedding, added to the rows of an fp32 buffer that were looked up: no other row is touched.

[Note: sum of equal rows] On CUDA index_add_ adds equal rows by atomics, in any order. A gradient as large as the
embedding, which is then added to the buffer, would be written and read in full for a few thousand rows. So the ids are
sorted, and equal ones are summed in this order: first in bags of at most 64 rows, then the bags of an id, because one
thread adds a bag, and padding may be thousands of equal rows. The number of bags depends on the ids, and the host does
not know it. So there are as many as rows, and those at the end are empty.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

BAG = 64


# (main_grad [V, h] fp32, ids [n], grad [n, h]): see add_rows
AddRows = Callable[[Tensor, Tensor, Tensor], None]


def add_rows(main_grad: Tensor, ids: Tensor, grad: Tensor) -> None:
    """Adds grad [n, h], of any float dtype, to the rows `ids` [n] of main_grad [V, h], in fp32.

    The result is the same bits in every run. The host does not wait.
    """
    if grad.is_cuda:
        add_sorted(main_grad, ids, grad)
    else:
        main_grad.index_add_(0, ids, grad.float())  # one after the other


def add_sorted(main_grad: Tensor, ids: Tensor, grad: Tensor) -> None:
    """Adds rows to the gradient in a fixed order of sums, by sorting them; see the note."""
    if not len(ids):
        return
    ids, order = ids.sort(stable=True)
    place = torch.arange(len(ids), device=ids.device)
    is_first = F.pad(ids[1:] != ids[:-1], (1, 0), value=True)
    within = place - torch.where(is_first, place, 0).cummax(0).values
    bags = _starts(within % BAG == 0)
    sums = F.embedding_bag(order, grad.float(), bags, mode="sum")
    # The bags of an id follow each other. Those without rows stand behind all others.
    first_rows = _starts(is_first)
    first_bags = torch.searchsorted(bags, first_rows)
    totals = F.embedding_bag(place, sums, first_bags, mode="sum")
    # Empty ones add zero, each to some row, so that no row gets many.
    rows = torch.where(first_rows < len(ids), ids[first_rows.clamp(max=len(ids) - 1)], place % len(main_grad))
    main_grad.index_add_(0, rows, totals)


def _starts(begins: Tensor) -> Tensor:
    """begins: bool [n], True where a group of rows begins -> the first row of each group [n]; n for groups without
    rows."""
    group = begins.long().cumsum(0)
    return torch.searchsorted(group, torch.arange(1, len(group) + 1, device=group.device))
