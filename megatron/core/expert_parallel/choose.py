"""The dispatcher of a layout."""

from __future__ import annotations

from megatron.config.moe_training import ALL_GATHER
from megatron.core.expert_parallel.dispatch import AllGather, AllToAll, Dispatcher, Local, Scattered
from megatron.core.groups import Groups
from megatron.kernels.ops.assignments import Assign


def choose_dispatcher(
    kind: str, groups: Groups, experts: int, layer: str, assign: Assign, *, sequence_parallel: bool
) -> Dispatcher:
    """Returns the dispatcher of --moe-token-dispatcher-type `kind` for `experts` on all ranks together, of a `layer`.
    assign: the kernel that sorts assignments.

    Without sequence parallelism all ranks of tp hold the same tokens, as in generation,
    and each dispatches a part of them.
    """
    group, etp = groups.etp_ep, groups.etp.size
    if group.size == 1:
        return Local(experts, assign)
    if groups.tp.size > 1 and not sequence_parallel:
        return Scattered(AllToAll(group, experts, etp, layer), groups.tp)
    return AllGather(group, experts, etp, assign) if kind == ALL_GATHER else AllToAll(group, experts, etp, layer)
