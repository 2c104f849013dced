"""A layout in words, short enough for a row of a table."""

from __future__ import annotations

from megatron.config.data_parallel import EVERY
from megatron.planner.search.axis import HIERARCHICAL, KEEP_ALL
from megatron.planner.search.layout import Layout

ZERO = {"no_shard": "dp without ZeRO", "optim": "ZeRO-1", "optim_grads": "ZeRO-2", "optim_grads_params": "ZeRO-3"}


def mesh_words(layout: Layout, world_size: int) -> str:
    """Returns the sizes: "tp 4, pp 4 x 5, dp 16, micro batch 1"; tp, cp, ep and pp only where they are above 1."""
    words = [f"{axis} {size}" for axis, size in (("tp", layout.tp), ("cp", layout.cp)) if size > 1]
    if layout.ep > 1 or layout.etp not in (1, layout.tp):
        words.append(f"ep {layout.ep}" + (f", etp {layout.etp}" if layout.etp != layout.tp else ""))
    if layout.pp > 1:
        words.append(f"pp {layout.pp}" + (f" x {layout.virtual_stages}" if layout.virtual_stages > 1 else ""))
    words.append(f"dp {world_size // (layout.tp * layout.cp * layout.pp)}")
    return ", ".join([*words, f"micro batch {layout.micro_batch}"])


def method_words(layout: Layout, world_size: int) -> str:
    """Returns the methods: "interleaved, tp overlapped, ZeRO-1 overlapped, recompute core_attn"."""
    words = []
    if layout.pp > 1:
        words.append(layout.schedule + (f" in groups of {layout.group}" if layout.group else ""))
        if layout.uneven_ends:
            words.append("fewer layers at the ends")
    if layout.tp > 1:
        if not layout.sequence_parallel:
            words.append("no sequence parallelism")
        if layout.tp_overlap:
            words.append("tp overlapped")
    if layout.cp > 1:
        words.append(f"cp by {layout.cp_kind}" + (f" of {layout.cp_inner}" if layout.cp_kind == HIERARCHICAL else ""))
    if world_size > layout.tp * layout.pp:  # ranks that share the optimizer's state
        shared = ZERO[layout.sharding]
        if layout.instances > 1:
            shared += f" in {layout.instances} instances"
        if layout.reduce_mode == EVERY:
            shared += ", reduced every microbatch"
        elif layout.dp_overlap:
            shared += " overlapped"
        words.append(shared)
    if layout.recompute != KEEP_ALL:
        words.append("recompute " + _recompute_words(layout.recompute))
    if layout.offload:
        words.append(f"{layout.offload:.0%} of activations on the host")
    if layout.optimizer_offload:
        words.append(f"{layout.optimizer_offload:.0%} of the optimizer on the host")
    return ", ".join(words)


def _recompute_words(recompute: str) -> str:
    first, grouped = (recompute.partition(sign) for sign in (":", "/"))
    if first[2]:
        return f"{first[0]} of {first[2]} layers per stage"
    return f"{grouped[0]} in groups of {grouped[2]}" if grouped[2] else recompute
