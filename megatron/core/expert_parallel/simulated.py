"""Routing of a dry run, whose tensors have no values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron.core.expert_parallel import plan
from megatron.spec.expert_rows import expected_ranks


@contextlib.contextmanager
def balanced_routing(tokens: int, topk: int, experts: int, ep: int, gathered: int = 1) -> Iterator[None]:
    """In the body the host reads the counts of tokens that choose their experts evenly, rounded down.

    tokens: those of each rank. gathered: the ranks whose tokens AllGather gathers.
    """
    load, rows = tokens * topk // experts, int(tokens * expected_ranks(experts, topk, ep) / ep)

    def read_counts(counts: Tensor) -> Any:
        counts.sum().item()  # the host waits here
        if counts.dim() == 1:
            return [gathered * load] * len(counts)
        return [[load] * (counts.shape[1] - 1) + [rows] for _ in counts]

    real = plan.read_counts
    vars(plan)["read_counts"] = read_counts
    try:
        yield
    finally:
        vars(plan)["read_counts"] = real
