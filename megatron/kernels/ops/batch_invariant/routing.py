"""The router in blocks of a fixed number of rows: see [Note: fixed shapes] in the package."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kernels.ops import routing
from megatron.kernels.ops.batch_invariant.gemm import padded_blocks
from megatron.kernels.ops.routing import Routed
from megatron.spec.moe import RouterSpec


def route(logits: Tensor, bias: Tensor | None, rule: RouterSpec, forced: Tensor | None) -> Routed:
    """See `routing.route`. A block has whole vectors of elements, whatever the number of experts."""
    blocks = padded_blocks(logits)
    choices = [None] * len(blocks) if forced is None else list(padded_blocks(forced))
    parts = [routing.route(block, bias, rule, choice) for block, choice in zip(blocks, choices, strict=True)]
    if not parts:
        return routing.route(logits, bias, rule, forced)
    return Routed(*(torch.cat(column)[: len(logits)] for column in zip(*parts, strict=True)))
