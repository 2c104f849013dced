"""Whether a schedule can be run, and how much it keeps in memory."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.schedule.schedule import (
    COMPUTE,
    COPIES,
    GRADIENTS_OF_INPUT,
    GRADIENTS_OF_WEIGHTS,
    NO_MICROBATCH,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Action,
    Kind,
    Schedule,
    ScheduleError,
    other_end,
)
from megatron.schedule.simulate import Costs, simulate


def check(schedule: Schedule, *, blocking: bool = False) -> None:
    """Raise ScheduleError, with action and rank, unless the schedule can be run as promised.

    Every stage sees every microbatch once, forward, and backward whole or split but all alike or not at all; each action
    is on the stage's rank and after what it needs there. If there are transfers, there is one for every edge that
    crosses ranks, sends are after what they send, receives before what needs them, and both ends of each direction
    between two ranks have the same order. Stages are gathered before their first forward, and reduced after their last
    gradient, if at all once. What is offloaded has been made, and is reloaded once, before its backward. And nobody
    waits for ever: with sends and receives that do not hold up their rank, or, `blocking`, even with a transport that
    keeps both ends standing until the data has moved.
    """
    where = _places(schedule)
    _check_each_once(schedule, where)
    _check_order_on_rank(schedule, where)
    _check_moves(schedule, where)
    if any(action.kind in TRANSFERS for action in where):
        _check_transfers(schedule, where)
    simulate(schedule, Costs.uniform(schedule.placement.num_stages, blocking=blocking))


@dataclass(frozen=True)
class InFlight:
    """The most that a rank keeps at once, in (stage, microbatch) pairs: chunks of a microbatch's activations.

    activations: forward begun, backward not complete. With a split backward: awaiting_input_grad, of which everything is
    kept, and awaiting_weight_grad, of which only what the weights' gradients need is; their peaks may come at
    different times.
    """

    activations: int
    awaiting_input_grad: int
    awaiting_weight_grad: int


def memory_in_flight(schedule: Schedule) -> tuple[InFlight, ...]:
    """Of each rank. Nothing is kept for a backward that never comes: without any, as in evaluation, all is 0."""
    return tuple(_in_flight(actions) for actions in schedule.actions)


def _in_flight(actions: Iterable[Action]) -> InFlight:
    before_input, before_weights = 0, 0  # pairs that wait for each half
    most = before_input_most = before_weights_most = 0
    if not any(action.kind in GRADIENTS_OF_WEIGHTS for action in actions):
        return InFlight(0, 0, 0)
    for action in actions:
        if action.kind is Kind.FORWARD:
            before_input += 1
        elif action.kind in GRADIENTS_OF_INPUT:
            before_input -= 1
            before_weights += action.kind is Kind.INPUT_GRAD
        elif action.kind is Kind.WEIGHT_GRAD:
            before_weights -= 1
        most = max(most, before_input + before_weights)
        before_input_most = max(before_input_most, before_input)
        before_weights_most = max(before_weights_most, before_weights)
    return InFlight(most, before_input_most, before_weights_most)


def chunks_near(schedule: Schedule, ratio: float, *, unmoved: float = 1.0) -> tuple[float, ...]:
    """The most that each rank holds in near memory at once, in chunks of a microbatch's activations.

    `ratio`: the share of a group's bytes that its OFFLOAD moves. Near are: what a forward makes, until the computation
    after it is over; what comes back, from the computation before its backward. `unmoved`: the share that a group keeps
    which the schedule does not move, once its forward is over. Whole backwards; a split one frees less at first.
    """
    return tuple(_chunks_near(actions, ratio, unmoved) for actions in schedule.actions)


def _chunks_near(actions: Iterable[Action], ratio: float, unmoved: float) -> float:
    """A group counts whole in the computations beside which it moves."""
    actions = tuple(actions)
    moved = {(a.stage, a.microbatch) for a in actions if a.kind is Kind.OFFLOAD}
    near: dict[tuple[int, int], float] = {}
    leaving: list[tuple[int, int]] = []  # since before the last computation
    left: list[tuple[int, int]] = []
    most = 0.0
    for kind, stage, microbatch in actions:
        group = (stage, microbatch)
        if kind is Kind.OFFLOAD:
            leaving.append(group)
        elif kind is Kind.RELOAD:
            near[group] = 1.0
        elif kind in COMPUTE:
            for gone in left:
                near[gone] = 1.0 - ratio
            left, leaving = leaving, []
            if kind is Kind.FORWARD:
                near[group] = 1.0 if group in moved else unmoved
            most = max(most, sum(near.values()))
            if kind in GRADIENTS_OF_WEIGHTS:
                del near[group]
    return most


def _places(schedule: Schedule) -> dict[Action, int]:
    """Index of each action in its rank's list."""
    rank_of, ranks = schedule.placement.rank_of, schedule.placement.num_ranks
    if len(schedule.actions) != ranks:
        raise ScheduleError(f"{schedule.name} has lists for {len(schedule.actions)} ranks, but stages on {ranks}")
    where: dict[Action, int] = {}
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if not 0 <= action.stage < len(rank_of) or rank_of[action.stage] != rank:
                raise _error(schedule, rank, action, "is not of this rank's stages")
            if action in where:
                raise _error(schedule, rank, action, "comes twice")
            where[action] = index
    return where


def _check_each_once(schedule: Schedule, where: dict[Action, int]) -> None:
    counts = Counter(action.kind for action in where)
    wanted = [Kind.FORWARD]
    if counts[Kind.BACKWARD]:
        wanted += [Kind.BACKWARD]
    if counts[Kind.INPUT_GRAD] or counts[Kind.WEIGHT_GRAD]:
        wanted += [Kind.INPUT_GRAD, Kind.WEIGHT_GRAD]
    if len(wanted) == 4:
        raise ScheduleError(f"{schedule.name} has whole backwards and split ones")
    microbatches = range(schedule.num_microbatches)
    for stage, rank in enumerate(schedule.placement.rank_of):
        for action in (Action(kind, stage, microbatch) for kind in wanted for microbatch in microbatches):
            if action not in where:
                raise _error(schedule, rank, action, "is missing")
    for action in where:
        whole_stage = action.kind in (Kind.REDUCE, Kind.GATHER)
        if action.microbatch != NO_MICROBATCH if whole_stage else action.microbatch not in microbatches:
            rank = schedule.placement.rank_of[action.stage]
            raise _error(schedule, rank, action, f"is of microbatch {action.microbatch}, of {len(microbatches)}")


def _check_order_on_rank(schedule: Schedule, where: dict[Action, int]) -> None:
    for rank, actions in enumerate(schedule.actions):
        begun: set[int] = set()  # stages that have seen a forward
        for index, (kind, stage, microbatch) in enumerate(actions):
            if kind is Kind.FORWARD:
                begun.add(stage)
            elif kind in GRADIENTS_OF_INPUT:
                _check_before(schedule, where, Action(Kind.FORWARD, stage, microbatch), actions[index])
            elif kind is Kind.WEIGHT_GRAD:
                _check_before(schedule, where, Action(Kind.INPUT_GRAD, stage, microbatch), actions[index])
            elif kind is Kind.GATHER and stage in begun:
                raise _error(schedule, rank, actions[index], "comes after the stage's first forward")
            elif kind is Kind.REDUCE:
                counts = Counter(a.kind for a in actions[:index] if a.stage == stage)
                if counts[Kind.BACKWARD] + counts[Kind.WEIGHT_GRAD] < schedule.num_microbatches:
                    raise _error(schedule, rank, actions[index], "comes before the stage's gradients are complete")


def _check_moves(schedule: Schedule, where: dict[Action, int]) -> None:
    """Forward, OFFLOAD, RELOAD, backward."""
    split = any(action.kind is Kind.INPUT_GRAD for action in where)
    for action in where:
        if action.kind not in COPIES:
            continue
        _, stage, microbatch = action
        rank = schedule.placement.rank_of[stage]
        backward = Kind.INPUT_GRAD if split else Kind.BACKWARD
        order = [Action(kind, stage, microbatch) for kind in (Kind.FORWARD, Kind.OFFLOAD, Kind.RELOAD, backward)]
        for step in order:
            if step not in where:
                raise _error(schedule, rank, action, f"has no {step}")
        for first, then in itertools.pairwise(order):
            _check_before(schedule, where, first, then)


def _check_before(schedule: Schedule, where: dict[Action, int], first: Action, then: Action) -> None:
    if where[first] > where[then]:
        raise _error(schedule, schedule.placement.rank_of[then.stage], then, f"comes before {first}")


def _check_transfers(schedule: Schedule, where: dict[Action, int]) -> None:
    expected = set()
    for action, index in where.items():
        if action.kind not in COMPUTE:
            continue
        rank = schedule.placement.rank_of[action.stage]
        if (send := schedule.send_after(action)) is not None:
            expected |= {send, other_end(send)}
            if where.get(send, -1) < index:
                raise _error(schedule, rank, send, f"is missing or comes before {action}")
        receive = schedule.receive_before(action)
        if receive is not None and where.get(receive, len(where)) > index:
            raise _error(schedule, rank, receive, f"is missing or comes after {action}")
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in TRANSFERS and action not in expected:
                raise _error(schedule, rank, action, "moves nothing between ranks")
    _check_same_order(schedule)


def _check_same_order(schedule: Schedule) -> None:
    """Both ends of each direction between two ranks, send for send and receive for receive."""
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in SENDS:
                sent.setdefault((rank, schedule.peer(action)), []).append(action)
            elif action.kind in RECEIVES:
                received.setdefault((schedule.peer(action), rank), []).append(action)
    for (source, destination), sends in sent.items():
        for send, receive in zip(sends, received[source, destination], strict=True):
            if other_end(send) != receive:
                raise _error(schedule, destination, receive, f"meets {send} of rank {source}")


def _error(schedule: Schedule, rank: int, action: Action, fault: str) -> ScheduleError:
    return ScheduleError(f"{schedule.name}, rank {rank}: {action} {fault}")
