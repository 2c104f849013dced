"""Pipeline schedules as data: the actions of each rank, in order.
The engine runs the lists, the simulator times them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megatron.base.errors import MegatronError


class ScheduleError(MegatronError, AssertionError):
    """A schedule that cannot be run, or not as promised: an error in this package, not of the user."""


class Kind(str, Enum):
    """The type of an action. Members are strings, which hash faster than plain members,
    because there are many of them."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of input and weights together
    INPUT_GRAD = "I"  # the first half of a split backward, for which the previous stage waits
    WEIGHT_GRAD = "W"  # the second half, for which no rank waits
    SEND_FORWARD = "SF"  # the stage's output, to the next stage
    RECV_FORWARD = "RF"  # the stage's input, from the stage before
    SEND_BACKWARD = "SB"  # the gradient of the stage's input, to the stage before
    RECV_BACKWARD = "RB"  # the gradient of the stage's output, from the next stage
    OFFLOAD = "O"  # starts to copy the forward's saved activations to host memory
    RELOAD = "L"  # starts to copy them back

    def __str__(self) -> str:
        return self.value


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})
TRANSFERS = SENDS | RECEIVES
COPIES = frozenset({Kind.OFFLOAD, Kind.RELOAD})
GRADIENTS_OF_INPUT = frozenset({Kind.BACKWARD, Kind.INPUT_GRAD})
GRADIENTS_OF_WEIGHTS = frozenset({Kind.BACKWARD, Kind.WEIGHT_GRAD})


class Action(NamedTuple):
    """One unit of a rank's work. `stage` is the virtual stage to which it belongs, on the rank that runs it.

    A SEND starts as soon as the transport permits and does not block the rank; a RECV allocates memory and posts the
    receive, and the computation that needs the data waits for it.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}@{self.stage}"


_OTHER_END = {
    Kind.SEND_FORWARD: (Kind.RECV_FORWARD, 1),
    Kind.RECV_FORWARD: (Kind.SEND_FORWARD, -1),
    Kind.SEND_BACKWARD: (Kind.RECV_BACKWARD, -1),
    Kind.RECV_BACKWARD: (Kind.SEND_BACKWARD, 1),
}


def other_end(transfer: Action) -> Action:
    """Returns the receive of a send, or the send of a receive."""
    kind, stage, microbatch = transfer
    other, step = _OTHER_END[kind]
    return Action(other, stage + step, microbatch)


def can_run_together(first: Action, second: Action) -> bool:
    """Returns whether `first` is a backward, and `second` a forward of another microbatch."""
    return first.kind in GRADIENTS_OF_INPUT and second.kind is Kind.FORWARD and first.microbatch != second.microbatch


@dataclass(frozen=True)
class Placement:
    """The assignment of virtual stages to ranks. Stage 0 has the embedding, the last one the loss.

    `rank_of` is the rank of each stage.
    """

    rank_of: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Number of virtual stages of the whole pipeline."""
        return len(self.rank_of)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline."""
        return max(self.rank_of) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages of a rank, in model order: its chunks."""
        return tuple(stage for stage, holder in enumerate(self.rank_of) if holder == rank)


def round_robin(p: int, v: int = 1) -> Placement:
    """Places stage s on rank s % p, with v stages per rank; with v = 1 a plain pipeline."""
    return Placement(tuple(stage % p for stage in range(p * v)))


def v_shape(p: int, v: int = 2) -> Placement:
    """Places stages down the ranks and back up, v times in turn. With v = 2 rank r holds stages r and 2p - 1 - r.

    With an even v the first rank has both the embedding and the loss.
    """
    return Placement(tuple(stage % p if stage // p % 2 == 0 else p - 1 - stage % p for stage in range(p * v)))


@dataclass(frozen=True)
class Schedule:
    """The work of a whole pipeline in one step. `actions` holds the list of each rank.

    with_next: backwards that run together with the forward that follows them in the list: the two take turns, so that
    each computes while the other exchanges tokens with other ranks.
    """

    name: str
    placement: Placement
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    with_next: frozenset[Action] = frozenset()

    def units(self, rank: int) -> list[tuple[Action, ...]]:
        """Returns the computations of a rank in order, two that run together as one unit."""
        computations = [action for action in self.actions[rank] if action.kind in COMPUTE]
        units: list[tuple[Action, ...]] = []
        for action in computations:
            if units and units[-1][-1] in self.with_next:
                units[-1] = (*units[-1], action)
            else:
                units.append((action,))
        return units

    def peer(self, transfer: Action) -> int:
        """Returns the rank at the other end of a send or receive."""
        return self.placement.rank_of[other_end(transfer).stage]

    def send_after(self, action: Action) -> Action | None:
        """Returns the send of a computation's result, or None if the result stays on the rank."""
        rank_of, (kind, stage, microbatch) = self.placement.rank_of, action
        if kind is Kind.FORWARD:
            if stage + 1 < len(rank_of) and rank_of[stage + 1] != rank_of[stage]:
                return Action(Kind.SEND_FORWARD, stage, microbatch)
        elif kind in GRADIENTS_OF_INPUT and stage > 0 and rank_of[stage - 1] != rank_of[stage]:
            return Action(Kind.SEND_BACKWARD, stage, microbatch)
        return None

    def receive_before(self, action: Action) -> Action | None:
        """Returns the receive of a computation's input from another rank, or None."""
        rank_of, stage = self.placement.rank_of, action.stage
        if action.kind is Kind.FORWARD:
            if stage > 0 and rank_of[stage - 1] != rank_of[stage]:
                return Action(Kind.RECV_FORWARD, stage, action.microbatch)
        elif action.kind in GRADIENTS_OF_INPUT and stage + 1 < len(rank_of) and rank_of[stage + 1] != rank_of[stage]:
            return Action(Kind.RECV_BACKWARD, stage, action.microbatch)
        return None
