"""Routing of a dry run, whose tensors have no values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.core.expert_parallel.plan import ReadCounts
from megatron.spec.expert_rows import expected_ranks


def balanced_counts(topk: int, experts: int, ep: int) -> ReadCounts:
    """Returns a function that reads the counts of tokens that choose their experts evenly, rounded down. All ranks have
    as many tokens."""
    ranks = expected_ranks(experts, topk, ep) / ep

    def read(counts: Tensor, tokens: int) -> Any:
        counts.sum().item()  # the host waits here
        load, rows = tokens * topk // experts, int(tokens * ranks)
        if counts.dim() == 1:
            return [load] * len(counts)
        return [[load] * (counts.shape[1] - 1) + [rows] for _ in counts]

    return read
