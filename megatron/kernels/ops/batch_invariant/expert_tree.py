"""The sum of the results of a token's experts in an order that the number of ranks does not change.

[Note: tree of experts] The experts of a layer are the leaves of a tree: as long as their number is even, they are cut
into two halves, and a part with an odd number is added up from its first expert to its last. A node adds what its two
parts have for the token, and rounds to the dtype of the rows; a part without one of the token's experts adds nothing.
The experts of a rank are a node where the number of ranks is a power of two, so it can add up its own, and the token's
rank the sums of the ranks by the rest of the tree: with the same bits as one rank that has all experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kernels.ops.assignments import RowOrder


def add_up(values: Tensor, by_row: RowOrder, ends: Tensor) -> Tensor:
    """values [A, h] of assignments -> their sums for each row, [M, h], zeros for a row without any.

    ends [E] int32: the number of assignments of each expert, or rank, and of those before it.
    """
    total = values.new_zeros(len(by_row.starts), values.shape[1])
    if not len(values):
        return total
    sums = values.index_select(0, by_row.order)
    places = torch.arange(len(sums), device=values.device)
    rows = torch.searchsorted(by_row.starts, places, right=True) - 1
    nodes = torch.searchsorted(ends, by_row.order.int(), right=True)
    halvings = (len(ends) & -len(ends)).bit_length() - 1
    nodes = nodes // (len(ends) >> halvings)
    for level in range(halvings + 1):
        nodes = nodes >> min(level, 1)
        while True:
            repeats = (rows[1:] == rows[:-1]) & (nodes[1:] == nodes[:-1])
            repeats[1:] &= ~repeats[:-1]  # of three or more, the first two
            seconds = repeats.nonzero().flatten() + 1
            if not len(seconds):
                break
            target, source = places[seconds - 1], places[seconds]
            sums.index_copy_(0, target, sums.index_select(0, target) + sums.index_select(0, source))
            left = torch.ones(len(places), dtype=torch.bool, device=values.device).index_fill_(0, seconds, False)
            places, rows, nodes = places[left], rows[left], nodes[left]
    return total.index_copy_(0, rows, sums.index_select(0, places))
