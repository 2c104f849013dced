"""Checks that a schedule can be run, and computes its peak of saved activations."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron.schedule.schedule import (
    COMPUTE,
    COPIES,
    GRADIENTS_OF_INPUT,
    GRADIENTS_OF_WEIGHTS,
    SENDS,
    TRANSFERS,
    Action,
    Kind,
    Schedule,
    ScheduleError,
    can_run_together,
    other_end,
)


def check(schedule: Schedule, *, blocking: bool = False) -> None:
    """Raises ScheduleError, with action and rank, unless the schedule can be run as promised.

    Every stage has every microbatch once, forward, and backward whole or split but all alike or not at all; each action
    is on the stage's rank and after the actions on which it depends there. If there are transfers, there is one for
    every edge that crosses ranks, sends are after the computation of their data, receives before its use, and both ends
    of each direction between two ranks have the same order. Offloaded activations have been computed, and are reloaded
    once, before their backward. Computations that run together are neighbours that do not depend on each other. No rank
    deadlocks: with sends and receives that do not block their rank, or, with
    `blocking`, even with a transport that blocks both ends until the data has moved.

    The time is linear in the number of actions.
    """
    where = _places(schedule)
    _check_each_once(schedule, where)
    _check_order_on_rank(schedule, where)
    _check_moves(schedule, where)
    _check_pairs(schedule, where)
    sends = _check_transfers(schedule, where) if any(action.kind in TRANSFERS for action in where) else {}
    _check_progress(schedule, sends, blocking=blocking)


@dataclass(frozen=True)
class InFlight:
    """The peak of a rank's saved activations, in (stage, microbatch) pairs: chunks of a microbatch's activations.

    `activations`: forward begun, backward not complete. With a split backward, `awaiting_input_grad` counts pairs of
    which everything is kept, and `awaiting_weight_grad` those of which only the inputs of the weights' gradients are
    kept; their peaks may be at different times.
    """

    activations: int
    awaiting_input_grad: int
    awaiting_weight_grad: int


def memory_in_flight(schedule: Schedule) -> tuple[InFlight, ...]:
    """Returns the peaks of each rank. Without any backward, as in evaluation, nothing is kept and all are 0."""
    return tuple(_in_flight(actions) for actions in schedule.actions)


def _in_flight(actions: Iterable[Action]) -> InFlight:
    before_input, before_weights = 0, 0  # pairs that wait for each half
    most = before_input_most = before_weights_most = 0
    if not any(action.kind in GRADIENTS_OF_WEIGHTS for action in actions):
        return InFlight(0, 0, 0)
    for kind, _, _ in actions:
        if kind is Kind.FORWARD:
            before_input += 1
        elif kind in GRADIENTS_OF_INPUT:
            before_input -= 1
            before_weights += kind is Kind.INPUT_GRAD
        elif kind is Kind.WEIGHT_GRAD:
            before_weights -= 1
        else:
            continue
        most = max(most, before_input + before_weights)
        before_input_most = max(before_input_most, before_input)
        before_weights_most = max(before_weights_most, before_weights)
    return InFlight(most, before_input_most, before_weights_most)


def most_under_way(actions: Iterable[Action]) -> dict[int, int]:
    """Returns of each stage in a rank's list the most microbatches that are between forward and backward at once."""
    now, most = Counter[int](), dict[int, int]()
    for action in actions:
        if action.kind is Kind.FORWARD:
            now[action.stage] += 1
            most[action.stage] = max(now[action.stage], most.get(action.stage, 0))
        elif action.kind in GRADIENTS_OF_INPUT:
            now[action.stage] -= 1
    return most


def chunks_on_device(schedule: Schedule, ratio: float, *, unmoved: float = 1.0) -> tuple[float, ...]:
    """Returns the most that each rank holds in device memory at once, in chunks of a microbatch's activations.

    `ratio`: the fraction of a group's bytes that its OFFLOAD moves. These bytes are on the device until the computation
    after their forward is over, and again from the computation before their backward on. `unmoved`: the fraction that a
    group without an OFFLOAD keeps on the device after its forward. Whole backwards are assumed; a split one frees less
    at first.
    """
    return tuple(_chunks_on_device(actions, ratio, unmoved) for actions in schedule.actions)


def _chunks_on_device(actions: Iterable[Action], ratio: float, unmoved: float) -> float:
    """A group counts fully during the computations that overlap its copies."""
    actions = tuple(actions)
    moved = {(a.stage, a.microbatch) for a in actions if a.kind is Kind.OFFLOAD}
    held: dict[tuple[int, int], float] = {}
    leaving: list[tuple[int, int]] = []  # since before the last computation
    left: list[tuple[int, int]] = []
    most = 0.0
    for kind, stage, microbatch in actions:
        group = (stage, microbatch)
        if kind is Kind.OFFLOAD:
            leaving.append(group)
        elif kind is Kind.RELOAD:
            held[group] = 1.0
        elif kind in COMPUTE:
            for gone in left:
                held[gone] = 1.0 - ratio
            left, leaving = leaving, []
            if kind is Kind.FORWARD:
                held[group] = 1.0 if group in moved else unmoved
            most = max(most, sum(held.values()))
            if kind in GRADIENTS_OF_WEIGHTS:
                del held[group]
    return most


def _places(schedule: Schedule) -> dict[Action, int]:
    """Returns the index of each action in its rank's list."""
    rank_of, ranks = schedule.placement.rank_of, schedule.placement.num_ranks
    if len(schedule.actions) != ranks:
        raise ScheduleError(f"{schedule.name} has lists for {len(schedule.actions)} ranks, but stages on {ranks}")
    where: dict[Action, int] = {}
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if not 0 <= action.stage < len(rank_of) or rank_of[action.stage] != rank:
                raise ScheduleError(f"{schedule.name}, rank {rank}: {action} is not of this rank's stages")
            if action in where:
                raise _error(schedule, action, "comes twice")
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
    for stage in range(schedule.placement.num_stages):
        for action in (Action(kind, stage, microbatch) for kind in wanted for microbatch in microbatches):
            if action not in where:
                raise _error(schedule, action, "is missing")
    for action in where:
        if action.microbatch not in microbatches:
            raise _error(schedule, action, f"is of microbatch {action.microbatch}, of {len(microbatches)}")


def _check_order_on_rank(schedule: Schedule, where: dict[Action, int]) -> None:
    for action in where:
        kind, stage, microbatch = action
        if kind in GRADIENTS_OF_INPUT:
            _check_before(schedule, where, Action(Kind.FORWARD, stage, microbatch), action)
        elif kind is Kind.WEIGHT_GRAD:
            _check_before(schedule, where, Action(Kind.INPUT_GRAD, stage, microbatch), action)


def _check_moves(schedule: Schedule, where: dict[Action, int]) -> None:
    """Checks the order forward, OFFLOAD, RELOAD, backward."""
    split = any(action.kind is Kind.INPUT_GRAD for action in where)
    for action in where:
        if action.kind not in COPIES:
            continue
        _, stage, microbatch = action
        backward = Kind.INPUT_GRAD if split else Kind.BACKWARD
        order = [Action(kind, stage, microbatch) for kind in (Kind.FORWARD, Kind.OFFLOAD, Kind.RELOAD, backward)]
        for step in order:
            if step not in where:
                raise _error(schedule, action, f"has no {step}")
        for first, then in itertools.pairwise(order):
            _check_before(schedule, where, first, then)


def _check_pairs(schedule: Schedule, where: dict[Action, int]) -> None:
    for first in schedule.with_next:
        actions = schedule.actions[schedule.placement.rank_of[first.stage]]
        second = actions[where[first] + 1] if first in where and where[first] + 1 < len(actions) else None
        if second is None or not can_run_together(first, second):
            raise _error(schedule, first, f"cannot run together with {second}")


def _check_before(schedule: Schedule, where: dict[Action, int], first: Action, then: Action) -> None:
    if where[first] > where[then]:
        raise _error(schedule, then, f"comes before {first}")


def _check_transfers(schedule: Schedule, where: dict[Action, int]) -> dict[Action, Action]:
    """Returns the send for which each computation waits, if it needs data of another rank."""
    sends: dict[Action, Action] = {}
    expected: set[Action] = set()
    for action, index in where.items():
        if action.kind not in COMPUTE or (send := schedule.send_after(action)) is None:
            continue
        receive = other_end(send)
        taker = Action(action.kind, receive.stage, action.microbatch)
        if where.get(send, -1) < index:
            raise _error(schedule, send, f"is missing or comes before {action}")
        if where.get(receive, len(where)) > where[taker]:
            raise _error(schedule, receive, f"is missing or comes after {taker}")
        sends[taker] = send
        expected.add(send)
        expected.add(receive)
    for action in where:
        if action.kind in TRANSFERS and action not in expected:
            raise _error(schedule, action, "moves nothing between ranks")
    _check_same_order(schedule, where)
    return sends


def _check_same_order(schedule: Schedule, where: dict[Action, int]) -> None:
    """Checks that in each direction between two ranks the receives have the order of their sends."""
    rank_of = schedule.placement.rank_of
    before: dict[tuple[int, int], Action] = {}  # (from rank, to rank) -> the last receive
    for send in where:
        if send.kind in SENDS:
            receive = other_end(send)
            direction = rank_of[send.stage], rank_of[receive.stage]
            if direction in before and where[before[direction]] > where[receive]:
                raise _error(
                    schedule,
                    receive,
                    f"comes before {before[direction]}, but {send} after {other_end(before[direction])}",
                )
            before[direction] = receive


def _check_progress(schedule: Schedule, sends: dict[Action, Action], *, blocking: bool) -> None:
    if stuck := stuck_at(schedule, sends, blocking=blocking):
        waits = "; ".join(f"rank {rank} at {action}, for {need}" for rank, (action, need) in sorted(stuck.items()))
        raise ScheduleError(f"{schedule.name}: ranks wait for each other: {waits}")


def stuck_at(
    schedule: Schedule, sends: Mapping[Action, Action] = MappingProxyType({}), *, blocking: bool = False
) -> dict[int, tuple[Action, Action]]:
    """Returns the ranks that cannot reach the end of their lists, with the action that each of them cannot begin and
    one that it waits for.

    Runs the lists without times: a rank continues until it needs an action that has not been reached yet. sends: those
    for which computations wait.
    """
    reached: set[Action] = set()
    waiting: dict[Action, list[int]] = {}  # action -> ranks that need it
    stuck: dict[int, tuple[Action, Action]] = {}
    place = [0] * len(schedule.actions)
    ready = list(range(len(schedule.actions)))
    while ready:
        rank = ready.pop()
        stuck.pop(rank, None)
        actions = schedule.actions[rank]
        while place[rank] < len(actions):
            action = actions[place[rank]]
            unit = actions[place[rank] : place[rank] + 2] if action in schedule.with_next else (action,)
            needs = (sends.get(member) or _needs(schedule, member, blocking=blocking) for member in unit)
            missing = next((need for need in needs if need is not None and need not in reached), None)
            if missing is None or action.kind in TRANSFERS:  # a transfer is posted before its rank blocks for it
                for member in unit:
                    reached.add(member)
                    ready += waiting.pop(member, ())
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                stuck[rank] = action, missing
                break
            place[rank] += len(unit)
    return stuck


def _needs(schedule: Schedule, action: Action, *, blocking: bool) -> Action | None:
    """Returns the action that must be reached before this one can end;
    data that is not sent is available immediately."""
    kind, stage, microbatch = action
    if kind in TRANSFERS:
        return other_end(action) if blocking else None
    if kind not in COMPUTE or kind is Kind.WEIGHT_GRAD:
        return None
    source = stage - 1 if kind is Kind.FORWARD else stage + 1
    return Action(kind, source, microbatch) if 0 <= source < schedule.placement.num_stages else None


def _error(schedule: Schedule, action: Action, fault: str) -> ScheduleError:
    return ScheduleError(f"{schedule.name}, rank {schedule.placement.rank_of[action.stage]}: {action} {fault}")
