"""Context-parallel attention in two steps, for the decoder layer."""

from __future__ import annotations

from megatron.core.context_parallel.all_gather import AllGatherAttention
from megatron.core.context_parallel.attention import context_parallel_attention
from megatron.core.context_parallel.steps import InOne, InTwo, LayerAttention
from megatron.core.context_parallel.trace import UNTRACED, Trace
from megatron.core.groups import Group
from megatron.kernels.ops.attention import AttentionKernel
from megatron.kernels.ops.attention_lse import BlockKernel


def context_attention(
    kind: str,
    cp: Group,
    inner: Group,
    outer: Group,
    kernel: AttentionKernel,
    block_kernel: BlockKernel,
    trace: Trace = UNTRACED,
) -> LayerAttention:
    """See context_parallel_attention."""
    attention = context_parallel_attention(kind, cp, inner, outer, kernel, block_kernel, trace)
    return InTwo(attention) if isinstance(attention, AllGatherAttention) else InOne(attention)
