"""Places the second half of a split backward (Qi et al., arXiv 2401.10241, section 2), for which no rank waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megatron.schedule.schedule import Action, Kind
from megatron.schedule.spec import Lists


def with_weight_grads(ranks: Sequence[Sequence[Action]], last_stage: int, max_held: int) -> Lists:
    """Adds a weight gradient for every input gradient, oldest first, wherever its rank would be idle.

    `ranks` are forwards and input gradients, in an order that can be run. `max_held` is the number of chunks'
    activations that a rank may keep from forward to weight gradient; a forward that would exceed it runs a weight
    gradient first. Simulated with F = I = W.
    """
    queues = [deque(actions) for actions in ranks]
    pending: list[deque[Action]] = [deque() for _ in ranks]  # input gradients whose weight gradient has not run yet
    held = [0] * len(ranks)
    filled: list[list[Action]] = [[] for _ in ranks]
    done: set[tuple[Kind, int, int]] = set()  # equal to actions, and made faster
    while any(queues) or any(pending):
        now = []
        for rank, queue in enumerate(queues):
            full = held[rank] == max_held
            if queue and _can_run(queue[0], done, last_stage) and not (full and queue[0].kind is Kind.FORWARD):
                action = queue.popleft()
                now.append(action)
                if action.kind is Kind.FORWARD:
                    held[rank] += 1
                else:
                    pending[rank].append(action)
            elif pending[rank]:
                _, stage, microbatch = pending[rank].popleft()
                action = Action(Kind.WEIGHT_GRAD, stage, microbatch)
                held[rank] -= 1
            else:
                continue
            filled[rank].append(action)
        done.update(now)
    return tuple(map(tuple, filled))


def _can_run(action: Action, done: set[tuple[Kind, int, int]], last_stage: int) -> bool:
    """Returns whether its input was ready before this unit of time. A rank's forward always precedes its gradient."""
    kind, stage, microbatch = action
    if kind is Kind.FORWARD:
        return stage == 0 or (kind, stage - 1, microbatch) in done
    return stage == last_stage or (kind, stage + 1, microbatch) in done
