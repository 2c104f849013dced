"""Context-parallel attention by the names of `--cp-comm-type`."""

from __future__ import annotations

from megatron.core.context_parallel.all_gather import AllGatherAttention
from megatron.core.context_parallel.ring import RingAttention
from megatron.core.context_parallel.ulysses import UlyssesAttention
from megatron.core.errors import ConfigError
from megatron.core.groups import Group
from megatron.kernels.ops.attention import AttentionKernel
from megatron.kernels.ops.attention_lse import BlockKernel


def context_attention(
    kind: str, cp: Group, inner: Group, outer: Group, kernel: AttentionKernel, block_kernel: BlockKernel
) -> AttentionKernel:
    """Attention over a sequence cut over `cp`, to be called like a kernel with this rank's part and all segments.

    inner, outer: `cp` as neighbours and as the ranks of the same place among theirs; read by a2a+p2p alone. kernel: for
    whole sequences; block_kernel: for blocks. Raises ConfigError for an unknown kind.
    """
    if kind == "p2p":
        return RingAttention(cp, block_kernel)
    if kind == "all_gather":
        return AllGatherAttention(cp, block_kernel)
    if kind == "a2a":
        return UlyssesAttention(cp, kernel)
    if kind == "a2a+p2p":
        return UlyssesAttention(inner, RingAttention(outer, block_kernel))
    raise ConfigError(f"--cp-comm-type {kind} is none of p2p, all_gather, a2a and a2a+p2p")
