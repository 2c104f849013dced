"""The engine on small functions: values, gradients, order, what is alive, and the time it takes."""

import dataclasses
import gc
import weakref
from enum import Enum

import pytest
import torch

from megatron.core.pipeline_parallel.engine import PipelineEngine
from megatron.schedule.costs import Costs
from megatron.schedule.passes import with_transfers
from megatron.schedule.registry import SCHEDULES as REGISTERED
from megatron.schedule.schedule import Action, Kind, ScheduleError
from megatron.schedule.schedules.forward_only import forward_only
from megatron.schedule.simulate import simulate
from megatron.schedule.validate import memory_in_flight
from tests.unit.pipeline_parallel.rank_threads import Box, Mail, in_threads

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)]


class Scale:
    """Stage s multiplies by its weight; the last one sums. A weight's gradient may be put off."""

    def __init__(self, weights, x, last):
        self.weights, self._x, self._last = weights, x, last
        self.order, self.lasts, self._jobs, self.hidden, self.objectives = [], [], {}, [], {}
        self.graphs, self.most_alive = (
            weakref.WeakSet(),
            0,
        )  # what graphs save, of forwards that wait for their backward

    def forward(self, stage, microbatch, received):
        self.order.append(("F", stage, microbatch))
        x = self._x[microbatch] if stage == 0 else received
        out = Multiply.apply(x, self.weights[stage], self)
        self.hidden.append(weakref.ref(out))
        self.most_alive = max(self.most_alive, len(self.graphs))
        if stage < self._last:
            return out
        objective = out.sum()
        self.objectives[microbatch] = objective.detach()
        return objective

    def backward(self, stage, microbatch, run, *, last):
        self.order.append(("B", stage, microbatch))
        self.put_off = None
        run()
        self.lasts += [(stage, microbatch)] if last else []

    def input_grad(self, stage, microbatch, run):
        self.order.append(("I", stage, microbatch))
        self.put_off = self._jobs[stage, microbatch] = []
        run()

    def weight_grad(self, stage, microbatch, *, last):
        self.order.append(("W", stage, microbatch))
        for job in self._jobs.pop((stage, microbatch)):
            job()
        self.lasts += [(stage, microbatch)] if last else []

    def shape(self, microbatch):
        return tuple(self._x[microbatch].shape)


class Saved:
    """Lives as long as the graph of a forward."""


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, owner):
        ctx.save_for_backward(x)
        ctx.weight, ctx.owner, ctx.saved = weight, owner, Saved()
        owner.graphs.add(ctx.saved)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        weight = ctx.weight

        def add():
            weight.grad = (grad * x).sum() + (0 if weight.grad is None else weight.grad)

        add() if ctx.owner.put_off is None else ctx.owner.put_off.append(add)
        return grad * weight, None, None


def run_all(schedule, programs, grad=True, dtype=torch.float64, box=lambda mail, rank, program: mail.box(rank)):
    """Every rank in a thread; the objectives of each."""
    mail = Mail()
    engines = [
        PipelineEngine(schedule, rank, program, box(mail, rank, program), dtype, program)
        for rank, program in enumerate(programs)
    ]

    def work(rank):
        with torch.set_grad_enabled(grad):
            engines[rank].run()

    in_threads(work, len(engines))
    return [[program.objectives[m] for m in sorted(program.objectives)] for program in programs]


def make(name, p, v, m, overlap):
    schedule = with_transfers(REGISTERED[name].build(p, m, v=v), overlap=overlap)
    generator = torch.Generator().manual_seed(p * 100 + m)
    x = torch.randn(m, 5, dtype=torch.float64, generator=generator)
    weights = [torch.tensor(1.0 + 0.1 * s, dtype=torch.float64, requires_grad=True) for s in range(p * v)]
    return schedule, x, weights


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("m", [1, 3, 6])
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize(("name", "v"), SCHEDULES)
def test_values_gradients_and_order(name, v, p, m, overlap):
    schedule, x, weights = make(name, p, v, m, overlap)
    programs = [Scale(weights, x, p * v - 1) for _ in range(p)]
    found = run_all(schedule, programs)
    product = torch.stack([weight.detach() for weight in weights]).prod()
    holder = schedule.placement.rank_of[-1]
    assert all(not found[rank] for rank in range(p) if rank != holder)
    torch.testing.assert_close(torch.stack(found[holder]), x.sum(1) * product)
    for weight in weights:
        torch.testing.assert_close(weight.grad, x.sum() * product / weight.detach())
    for rank, program in enumerate(programs):
        computed = [action for action in schedule.actions[rank] if action.kind.value in "FBIW"]
        assert program.order == [(action.kind.value, action.stage, action.microbatch) for action in computed]
        ends = [action for action in computed if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)]
        stages = schedule.placement.stages_of(rank)
        expected = {s: [(a.stage, a.microbatch) for a in ends if a.stage == s][-1] for s in stages}
        assert sorted(program.lasts) == sorted(expected.values())


@pytest.mark.parametrize(("name", "v"), SCHEDULES)
def test_what_is_alive_is_what_the_schedule_says(name, v):
    p, m = 4, 9
    schedule, x, weights = make(name, p, v, m, True)
    programs = [Scale(weights, x, p * v - 1) for _ in range(p)]
    run_all(schedule, programs)
    promised = [rank.awaiting_input_grad for rank in memory_in_flight(REGISTERED[name].build(p, m, v=v))]
    assert [program.most_alive for program in programs] == promised
    assert not any(program.graphs for program in programs), "all are freed at the end"


class Unknown(Enum):
    KIND = "X"


def test_an_action_that_it_does_not_know():
    """Such as one of a pass that was written after the engine."""
    schedule, x, weights = make("1f1b", 1, 1, 2, True)
    schedule = dataclasses.replace(schedule, actions=((*schedule.actions[0], Action(Unknown.KIND, 0, 0)),))
    with pytest.raises(ScheduleError, match="1f1b holds X0@0, which the engine cannot run"):
        run_all(schedule, [Scale(weights, x, 0)])


def test_an_output_that_was_sent_is_not_kept():
    """Backward needs the edge of the graph alone: the output itself is freed when it has left."""
    schedule, x, weights = make("1f1b", 2, 1, 2, True)
    programs = [Scale(weights, x, 1) for _ in range(2)]
    seen = []
    forward = programs[0].forward

    def watching(stage, microbatch, received):
        gc.collect()
        seen.append([ref() is None for ref in programs[0].hidden])
        return forward(stage, microbatch, received)

    programs[0].forward = watching
    run_all(schedule, programs)
    assert seen == [[], [True]]


@pytest.mark.parametrize(("name", "v"), SCHEDULES)
def test_forwards_alone(name, v):
    schedule, x, weights = make(name, 2, v, 3, True)
    schedule = with_transfers(forward_only(REGISTERED[name].build(2, 3, v=v)), overlap=True)
    found = run_all(schedule, [Scale(weights, x, 2 * v - 1) for _ in range(2)], grad=False)
    product = torch.stack([weight.detach() for weight in weights]).prod()
    torch.testing.assert_close(torch.stack(found[schedule.placement.rank_of[-1]]), x.sum(1) * product)
    assert not any(weight.grad for weight in weights)


def test_an_input_without_influence_has_a_gradient_of_zero():
    schedule, x, weights = make("1f1b", 2, 1, 1, True)
    programs = [Scale(weights, x, 1) for _ in range(2)]
    programs[1].forward = lambda stage, microbatch, received: weights[1] * 3.0
    run_all(schedule, programs)
    assert float(weights[0].grad) == 0.0 and float(weights[1].grad) == 3.0


class Timed(Scale):
    """Its work takes units of a time of its own, so that a wait shows at any load of the machine."""

    now = 0.0

    def forward(self, stage, microbatch, received):
        self.now += 1
        return super().forward(stage, microbatch, received)

    def backward(self, stage, microbatch, run, *, last):
        self.now += 2
        super().backward(stage, microbatch, run, last=last)

    def input_grad(self, stage, microbatch, run):
        self.now += 1
        super().input_grad(stage, microbatch, run)

    def weight_grad(self, stage, microbatch, *, last):
        self.now += 1
        super().weight_grad(stage, microbatch, last=last)


class TimedBox(Box):
    """A message carries the time at which it was sent; who takes it goes on no earlier."""

    def __init__(self, mail, rank, program):
        super().__init__(mail, rank)
        self._program = program

    def send(self, tensor, peer, name):
        self._mail.put((self._rank, peer), (tensor.clone(), self._program.now))

    def receive(self, shape, dtype, peer, name):
        return TimedMessage(super().receive(shape, dtype, peer, name), self._program)


class TimedMessage:
    def __init__(self, message, program):
        self._message, self._program = message, program

    def take(self):
        tensor, sent = self._message.take()
        self._program.now = max(self._program.now, sent)
        return tensor


@pytest.mark.parametrize(("name", "v"), SCHEDULES)
def test_no_rank_waits_longer_than_simulated(name, v):
    p, m = 4, 6
    schedule, x, weights = make(name, p, v, m, True)
    programs = [Timed(weights, x, p * v - 1) for _ in range(p)]
    run_all(schedule, programs, box=TimedBox)
    assert max(program.now for program in programs) == simulate(schedule, Costs.uniform(p * v)).makespan
