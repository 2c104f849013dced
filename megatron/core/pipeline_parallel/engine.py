"""Runs a rank's list of actions. The engine knows actions, messages and one Program; it never looks into a batch.

[Note: what is alive]
A forward leaves behind its input (a leaf that collects a gradient) and the edge of the graph at its output, not the
output itself: once that has been sent, or taken over by the next stage on this rank, nothing but the graph holds it,
and backward needs only the edge. Both live until the backward, or its first half, has run.

Two computations that the schedule runs together take turns: see core/streams/turns.py. Nothing is sent or received
between the beginning of the first one and the end of the second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.streams.turns import TimedComputation, Turns
from megatron.schedule.schedule import (
    COMPUTE,
    GRADIENTS_OF_INPUT,
    GRADIENTS_OF_WEIGHTS,
    Action,
    Kind,
    Schedule,
    ScheduleError,
)

StageMicrobatch = tuple[int, int]  # stage, microbatch


class Program(Protocol):
    """What the stages of this rank compute."""

    def forward(self, stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        """The stage's output; of the last stage a scalar, the objective, whose value nothing here reads. `received`:
        the output of the stage before."""
        ...

    def shape(self, microbatch: int) -> tuple[int, ...]:
        """Shape of the hidden states between stages."""
        ...


class Gradients(Protocol):
    """How the stages of this rank are differentiated."""

    def backward(self, stage: int, microbatch: int, run: Callable[[], None], *, last: bool) -> None:
        """Call `run`, which differentiates the stage, or does nothing where all of it is frozen.

        `last`: nothing is added to the stage's gradients afterwards.
        """
        ...

    def input_grad(self, stage: int, microbatch: int, run: Callable[[], None]) -> None:
        """Call `run`, which differentiates the stage by its input; gradients of weights are put off."""
        ...

    def weight_grad(self, stage: int, microbatch: int, *, last: bool) -> None:
        """What `input_grad` put off."""
        ...


class Post(Protocol):
    """How messages travel; see comm/pipeline_messages.py."""

    def send(self, tensor: Tensor, peer: int, name: str) -> None:
        """Start to send."""
        ...

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, name: str) -> Message:
        """Start to receive."""
        ...

    def flush(self) -> None:
        """Wait until everything has left."""
        ...


class Offload(Protocol):
    """Where activations wait for their backward; see core/offload/activations.py."""

    def offload(self, stage: int, microbatch: int) -> None:
        """Starts to offload the forward's saved activations to host memory."""
        ...

    def reload(self, stage: int, microbatch: int) -> None:
        """Start to bring it back; the backward waits for it."""
        ...


class Message(Protocol):
    """Something on its way here."""

    def take(self) -> Tensor:
        """Wait for it."""
        ...


@dataclass(frozen=True)
class _Alive:
    """What a forward leaves for its backward. `edge` is None where nothing needs a gradient. `objective`: of the last
    stage."""

    input: Tensor | None
    edge: GradientEdge | None
    objective: Tensor | None


class PipelineEngine:
    """Runs one rank's part of a schedule, which holds its transfers."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        program: Program,
        post: Post,
        dtype: torch.dtype,
        gradients: Gradients | None = None,
        offload: Offload | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`dtype`: of the hidden states between stages. `gradients`: None where the schedule holds forwards only,
        `offload` where it moves no activations, and `turns` where no two computations run together."""
        self._schedule, self._program, self._post, self._dtype = schedule, program, post, dtype
        self._offload, self._turns = offload, turns
        self._differentiation = gradients
        self._actions = schedule.actions[rank]
        self._last_stage = schedule.placement.num_stages - 1
        self._outputs: dict[StageMicrobatch, Tensor] = {}  # of stages here, not yet sent or taken over
        self._gradients: dict[StageMicrobatch, Tensor] = {}  # of the inputs of stages here, the same way
        self._messages: dict[Action, Message] = {}
        self._alive: dict[StageMicrobatch, _Alive] = {}

    def run(
        self,
        before: Callable[[Sequence[Action]], None] = lambda actions: None,
        timed: Callable[[Action], AbstractContextManager[None]] = lambda action: nullcontext(),
    ) -> None:
        """Runs all actions. before: told of each, or of two that run together. timed: returns a context around each
        computation, and around each of its turns. Raises CommError."""
        for unit in self._units():
            before([action for action, _ in unit])
            action, last = unit[0]
            if len(unit) == 2:
                self._run_together(unit, timed)
            elif action.kind is Kind.FORWARD:
                _, stage, m = action
                received = self._input(action)
                with timed(action):
                    self._keep(stage, m, received, self._program.forward(stage, m, received))
                del received  # which would else be alive until the next forward; see the note
            elif action.kind in COMPUTE:
                arrived = self._input(action)
                with timed(action):
                    self._backward(action, arrived, last=last)
                del arrived
            else:
                self._move(action)
        self._post.flush()

    def _run_together(
        self, unit: Sequence[tuple[Action, bool]], timed: Callable[[Action], AbstractContextManager[None]]
    ) -> None:
        """Runs a backward and a forward in turns, when the inputs of both have arrived."""
        assert self._turns is not None, f"{self._schedule.name} runs two computations together"
        (first, last), (second, _) = unit
        gradient, received = self._input(first), self._input(second)
        _, stage, m = second
        self._turns.run(
            TimedComputation(
                functools.partial(self._backward, first, gradient, last=last), functools.partial(timed, first)
            ),
            TimedComputation(
                lambda: self._keep(stage, m, received, self._program.forward(stage, m, received)),
                functools.partial(timed, second),
            ),
        )

    def _units(self) -> Iterator[list[tuple[Action, bool]]]:
        """Each action, or two that run together, and whether it is the last that adds to the gradients of its
        stage."""
        last = {action.stage: n for n, action in enumerate(self._actions) if action.kind in GRADIENTS_OF_WEIGHTS}
        unit: list[tuple[Action, bool]] = []
        for number, action in enumerate(self._actions):
            unit.append((action, last.get(action.stage) == number))
            if action not in self._schedule.with_next:
                yield unit
                unit = []

    def _move(self, action: Action) -> None:
        kind, stage, m = action
        match kind:
            case Kind.SEND_FORWARD:
                self._send(action, self._outputs.pop((stage, m)))
            case Kind.SEND_BACKWARD:
                self._send(action, self._gradients.pop((stage, m)))
            case Kind.RECV_FORWARD | Kind.RECV_BACKWARD:
                peer = self._schedule.peer(action)
                self._messages[action] = self._post.receive(self._program.shape(m), self._dtype, peer, str(action))
            case Kind.OFFLOAD:
                self._mover.offload(stage, m)
            case Kind.RELOAD:
                self._mover.reload(stage, m)
            case _:
                raise ScheduleError(f"{self._schedule.name} holds {action}, which the engine cannot run")

    @property
    def _backwards(self) -> Gradients:
        assert self._differentiation is not None, f"{self._schedule.name} has backwards, and nobody to run them"
        return self._differentiation

    @property
    def _mover(self) -> Offload:
        assert self._offload is not None, f"{self._schedule.name} moves activations, and nobody to move them"
        return self._offload

    def _input(self, action: Action) -> Tensor | None:
        """Returns what a computation takes from another stage; None from none.

        The input of a forward collects a gradient if there will be a backward.
        """
        kind, stage, m = action
        if kind is Kind.FORWARD and stage > 0:
            received = self._arrived(Kind.RECV_FORWARD, stage, m, self._outputs, (stage - 1, m))
            return received.requires_grad_() if torch.is_grad_enabled() else received
        if kind in GRADIENTS_OF_INPUT and stage < self._last_stage:
            return self._arrived(Kind.RECV_BACKWARD, stage, m, self._gradients, (stage + 1, m))
        return None

    def _keep(self, stage: int, m: int, received: Tensor | None, output: Tensor) -> None:
        """Keep what the backward and the next stage need."""
        is_last = stage == self._last_stage
        if torch.is_grad_enabled():
            edge = get_gradient_edge(output) if output.requires_grad else None
            self._alive[stage, m] = _Alive(received, edge, output.detach() if is_last else None)
        if not is_last:
            self._outputs[stage, m] = output.detach()

    def _backward(self, action: Action, gradient: Tensor | None, *, last: bool) -> None:
        """Runs a backward or half of a split one.

        gradient: of the stage's output; None for the last stage, whose output is the objective, and for gradients of
        weights.
        """
        kind, stage, m = action
        if kind is Kind.WEIGHT_GRAD:
            self._backwards.weight_grad(stage, m, last=last)
            return
        alive = self._alive.pop((stage, m))
        if alive.objective is not None:
            gradient = torch.ones_like(alive.objective)
        edge = alive.edge

        def differentiate() -> None:
            if edge is not None:
                torch.autograd.backward(edge, gradient)

        if kind is Kind.BACKWARD:
            self._backwards.backward(stage, m, differentiate, last=last)
        else:
            self._backwards.input_grad(stage, m, differentiate)
        if alive.input is not None:
            self._gradients[stage, m] = torch.zeros_like(alive.input) if alive.input.grad is None else alive.input.grad

    def _arrived(
        self, kind: Kind, stage: int, m: int, arrived: dict[StageMicrobatch, Tensor], place: StageMicrobatch
    ) -> Tensor:
        """From another rank, or from the neighbouring stage on this one."""
        message = self._messages.pop(Action(kind, stage, m), None)
        return arrived.pop(place) if message is None else message.take()

    def _send(self, action: Action, tensor: Tensor) -> None:
        self._post.send(tensor, self._schedule.peer(action), str(action))
