"""Which rows each expert of a rank works on."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Assignments(NamedTuple):
    """A assignments of rows to the local experts, sorted by expert and then by row.

    An expert has a row at most once. The order of a row's experts is ascending, so sums over them have one order.

    rows: [A] int64 on the device, the row of each assignment. sizes: the number of assignments of each local expert, on
    the host, so that products of each expert can be launched without waiting for the device. Their sum is A.
    """

    rows: Tensor
    sizes: list[int]
