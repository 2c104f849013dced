"""Which rows each expert of a rank works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class RowOrder(NamedTuple):
    """The assignments sorted by row and then by expert, so that sums over a row's experts have one order.

    order: [A] int64, the place of each one among the assignments. starts: [M] int64, where those of each row begin.
    """

    order: Tensor
    starts: Tensor


class Assignments(NamedTuple):
    """A assignments of rows to the local experts, sorted by expert and then by row.

    An expert has a row at most once. The order of a row's experts is ascending, so sums over them have one order.

    rows: [A] int64 on the device, the row of each assignment. ends: [E] int32 on the device, the number of assignments
    of each local expert and of those before it. sizes: the number of assignments of each local expert, for products
    that the host launches expert by expert; it may wait for the device until they are there. Their sum is A. by_row:
    None if it is still to be found out (`row_order`).
    """

    rows: Tensor
    ends: Tensor
    sizes: Sequence[int]
    by_row: RowOrder | None = None


def row_order(assignments: Assignments, count: int) -> RowOrder:
    """The order of assignments to `count` rows, M."""
    if assignments.by_row is not None:
        return assignments.by_row
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
    """How rows are copied to their assignments, and what was computed there is added up.

    in_tree: the results of experts are added up by batch_invariant/expert_tree.py, on a rank and over ranks.
    """

    gather: Gather
    add_up: Callable[[Tensor, RowOrder], Tensor]
    in_tree: bool = False


SEPARATE = RowKernels(gather, add_up)


class Assigned(NamedTuple):
    """What follows from the experts of each row, before the host knows how much of it there is: only the first A
    entries of positions, rows and by_row.order have a meaning.

    positions: [M * k] int64, the place of each assignment in the flattened indices. counts: [E] int32, the number of
    assignments of each expert. rows, ends, by_row: as in Assignments.
    """

    positions: Tensor
    rows: Tensor
    counts: Tensor
    ends: Tensor
    by_row: RowOrder | None


# (indices [M, k] int64 of any experts, or -1; first; E) -> the assignments of experts `first` to `first + E - 1`
Assign = Callable[[Tensor, int, int], Assigned]


def assign(indices: Tensor, first: int, experts: int) -> Assigned:
    """The reference: a stable sort of the experts."""
    _, positions, counts = sort_by_expert(indices.flatten() - first, experts)
    return Assigned(positions, positions // indices.shape[1], counts, counts.cumsum(0).int(), None)


def sort_by_expert(experts: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """[T * k] -> (experts in order, their places before, how often each of the `number` stands there).

    All others stand at the end as `number`.
    """
    clipped = torch.where((experts >= 0) & (experts < number), experts, number)
    ordered, places = clipped.sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(number + 1, device=experts.device))
    return ordered, places, bounds.diff()
