"""Attention over a sequence that is sharded between the ranks of a group, by the types of `--cp-comm-type`."""

from __future__ import annotations

from megatron.base.errors import ConfigError
from megatron.core.context_parallel.all_gather import AllGatherAttention
from megatron.core.context_parallel.ring import RingAttention
from megatron.core.context_parallel.transfer_trace import UNTRACED, Trace
from megatron.core.context_parallel.ulysses import UlyssesAttention
from megatron.core.groups import Group
from megatron.kernels.ops.attention import AttentionKernel
from megatron.kernels.ops.attention_lse import BlockKernel

ContextParallelAttention = RingAttention | AllGatherAttention | UlyssesAttention


def context_parallel_attention(
    comm_type: str,
    cp: Group,
    inner: Group,
    outer: Group,
    kernel: AttentionKernel,
    block_kernel: BlockKernel,
    trace: Trace = UNTRACED,
) -> ContextParallelAttention:
    """Attention that is called like a kernel: with this rank's part of q, k and v, and the segments of the whole
    sequence.

    cp: the ranks that share a sequence. inner, outer: `cp` as groups of neighbours, and as groups of the ranks with the
    same place among theirs; read by a2a+p2p alone. kernel: for whole sequences; block_kernel: for blocks. trace: draws
    the transfers. Raises ConfigError for an unknown type.
    """
    if comm_type == "p2p":
        return RingAttention(cp, block_kernel, trace)
    if comm_type == "all_gather":
        return AllGatherAttention(cp, block_kernel, trace)
    if comm_type == "a2a":
        return UlyssesAttention(cp, kernel, trace)
    if comm_type == "a2a+p2p":
        return UlyssesAttention(inner, RingAttention(outer, block_kernel, trace), trace)
    raise ConfigError(f"--cp-comm-type {comm_type} is none of p2p, all_gather, a2a and a2a+p2p")
