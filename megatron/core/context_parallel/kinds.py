"""Context-parallel attention by the names of `--cp-comm-type`."""

from __future__ import annotations

from megatron.base.errors import ConfigError
from megatron.core.context_parallel.all_gather import AllGatherAttention
from megatron.core.context_parallel.ring import RingAttention
from megatron.core.context_parallel.steps import InOne, LayerAttention
from megatron.core.context_parallel.ulysses import UlyssesAttention
from megatron.core.context_parallel.watch import UNWATCHED, Watch
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
    watch: Watch = UNWATCHED,
) -> LayerAttention:
    """Attention over a sequence cut over `cp`: a rank gives its part, and the segments of all.

    inner, outer: `cp` as neighbours and as the ranks of the same place among theirs; read by a2a+p2p alone. kernel: for
    whole sequences; block_kernel: for blocks. watch: draws what travels. Raises ConfigError for an unknown kind.
    """
    if kind == "p2p":
        return InOne(RingAttention(cp, block_kernel, watch))
    if kind == "all_gather":
        return AllGatherAttention(cp, block_kernel, watch)
    if kind == "a2a":
        return InOne(UlyssesAttention(cp, kernel, watch))
    if kind == "a2a+p2p":
        return InOne(UlyssesAttention(inner, RingAttention(outer, block_kernel, watch), watch))
    raise ConfigError(f"--cp-comm-type {kind} is none of p2p, all_gather, a2a and a2a+p2p")
