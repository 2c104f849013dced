"""Which rows each expert of a rank works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Assignments(NamedTuple):
    """A assignments of rows to the local experts, sorted by expert and then by row.

    An expert has a row at most once. The order of a row's experts is ascending, so sums over them have one order.

    rows: [A] int64 on the device, the row of each assignment. ends: [E] int32 on the device, the number of assignments of
    each local expert and of those before it. sizes: the number of assignments of each local expert, on the host, so that
    products of each expert can be launched without waiting for the device. Their sum is A.
    """

    rows: Tensor
    ends: Tensor
    sizes: list[int]


class RowOrder(NamedTuple):
    """The assignments sorted by row and then by expert, so that sums over a row's experts have one order.

    order: [A] int64, the place of each one among the assignments. starts: [M] int64, where those of each row begin.
    """

    order: Tensor
    starts: Tensor


def row_order(assignments: Assignments, count: int) -> RowOrder:
    """The order of assignments to `count` rows, M."""
    rows, order = assignments.rows.sort(stable=True)
    return RowOrder(order, torch.searchsorted(rows, torch.arange(count, device=rows.device)))


def gather(rows: Tensor, of: Tensor) -> Tensor:
    """rows [M, h], of [A] int64 -> the rows of these numbers, [A, h]."""
    return rows.index_select(0, of)


def add_up(values: Tensor, by_row: RowOrder) -> Tensor:
    """values [A, h] of assignments -> their sum for each row, [M, h]: in ascending order of the experts, in fp32, and
    rounded once."""
    if not len(values):
        return values.new_zeros(len(by_row.starts), values.shape[1])
    # Adds the values of a row one after the other, in this order; index_add_ on CUDA would add them in any order.
    return F.embedding_bag(by_row.order, values, by_row.starts, mode="sum")


# (rows [M, h], the rows' numbers [A] int64) -> [A, h]
Gather = Callable[[Tensor, Tensor], Tensor]


class Picked(NamedTuple):
    """One operand of a product, [A, w]: rows [A] int64 of a source [M, w], or the source itself where rows is None."""

    source: Tensor
    rows: Tensor | None

    def gathered(self, gather: Gather) -> Tensor:
        """Returns the operand."""
        return self.source if self.rows is None else gather(self.source, self.rows)


class RowKernels(NamedTuple):
    """How rows are copied to their assignments, and what was computed there is added up."""

    gather: Gather
    add_up: Callable[[Tensor, RowOrder], Tensor]


SEPARATE = RowKernels(gather, add_up)
