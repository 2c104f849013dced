"""Routing of a dry run, whose tensors have no values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.core.expert_parallel.plan import ReadCounts
from megatron.spec.expert_rows import expected_ranks


def balanced_counts(tokens: int, topk: int, experts: int, ep: int, gathered: int = 1) -> ReadCounts:
    """Returns a function that reads the counts of tokens that choose their experts evenly, rounded down.

    tokens: of each rank. gathered: the ranks whose tokens AllGather gathers.
    """
    load, rows = tokens * topk // experts, int(tokens * expected_ranks(experts, topk, ep) / ep)

    def read(counts: Tensor) -> Any:
        counts.sum().item()  # the host waits here
        if counts.dim() == 1:
            return [gathered * load] * len(counts)
        return [[load] * (counts.shape[1] - 1) + [rows] for _ in counts]

    return read
