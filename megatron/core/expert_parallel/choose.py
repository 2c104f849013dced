"""The dispatcher of a layout."""

from __future__ import annotations

from collections.abc import Callable

from megatron.config.moe_training import ALL_GATHER
from megatron.core.expert_parallel.dispatch import AllGather, AllToAll, Dispatcher, Local, Scattered
from megatron.core.expert_parallel.plan import ReadCounts, read_counts
from megatron.core.groups import Groups
from megatron.kernels.ops.assignments import Assign


def choose_dispatcher(
    kind: str,
    groups: Groups,
    experts: int,
    layer: str,
    assign: Assign,
    read: ReadCounts = read_counts,
    yield_turn: Callable[[], None] = lambda: None,
    *,
    sequence_parallel: bool,
    in_tree: bool = False,
) -> Dispatcher:
    """Returns the dispatcher of --moe-token-dispatcher-type `kind` for `experts` on all ranks together, of a `layer`.
    assign: the kernel that sorts assignments. read: brings their counts to the host.
    yield_turn, in_tree: see AllToAll.

    Without sequence parallelism all ranks of tp hold the same tokens, as in generation,
    and each dispatches a part of them.
    """
    group, etp = groups.etp_ep, groups.etp.size
    if group.size == 1:
        return Local(experts, assign, read)
    if groups.tp.size > 1 and not sequence_parallel:
        return Scattered(AllToAll(group, experts, etp, layer, read, in_tree=in_tree), groups.tp)
    if kind == ALL_GATHER:
        return AllGather(group, experts, etp, assign, read)
    return AllToAll(group, experts, etp, layer, read, yield_turn, in_tree=in_tree)
