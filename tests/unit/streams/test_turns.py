"""Two computations in turns: their order, their time, and the failure of one of them."""

import contextlib

import pytest
import torch

from megatron.core.streams.turns import OneByOne, Switch, TimedComputation, Turns

CPU = torch.device("cpu")


def steps(turns, log, name, count, fails_at=None):
    """A computation that gives way between its steps."""

    def run():
        for step in range(count):
            if step:
                turns.yield_turn()
            if step == fails_at:
                raise ValueError(name)
            log.append(f"{name}{step}")

    return run


def pair(turns, log, first, second, **fails_at):
    turns.run(
        TimedComputation(steps(turns, log, "a", first, fails_at.get("a"))),
        TimedComputation(steps(turns, log, "b", second, fails_at.get("b"))),
    )


@pytest.mark.parametrize(
    ("first", "second", "order"),
    [(3, 3, "a0 b0 a1 b1 a2 b2"), (1, 3, "a0 b0 b1 b2"), (4, 1, "a0 b0 a1 a2 a3"), (2, 4, "a0 b0 a1 b1 b2 b3")],
)
def test_the_order(first, second, order):
    turns = Turns(CPU)
    for _ in range(3):
        log = []
        pair(turns, log, first, second)
        assert log == order.split()


def test_outside_of_a_pair_nobody_gives_way():
    turns, log = Turns(CPU), []
    steps(turns, log, "a", 3)()
    pair(turns, log, 1, 1)
    steps(turns, log, "c", 2)()
    assert log == ["a0", "a1", "a2", "a0", "b0", "c0", "c1"]


def test_one_by_one():
    turns, log = OneByOne(CPU), []
    pair(turns, log, 2, 2)
    assert log == ["a0", "a1", "b0", "b1"]


@pytest.mark.parametrize(
    ("name", "step", "order"),
    [("a", 0, ""), ("a", 1, "a0 b0"), ("b", 0, "a0"), ("b", 1, "a0 b0 a1"), ("b", 2, "a0 b0 a1 b1 a2")],
)
def test_a_failure_ends_both(name, step, order):
    """And the next pair runs."""
    turns, log = Turns(CPU), []
    with pytest.raises(ValueError, match=name):
        pair(turns, log, 3, 3, **{name: step})
    assert log == order.split()
    log.clear()
    pair(turns, log, 2, 2)
    assert log == ["a0", "b0", "a1", "b1"]


def test_a_failure_in_backward():
    """Autograd passes on what a node raises, and what ends a node that has given way."""
    turns, log = Turns(CPU), []

    class GivesWay(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            log.append("backward")
            turns.yield_turn()
            log.append("again")
            return grad * 2

    x = torch.ones(1, requires_grad=True)
    out = GivesWay.apply(x)
    with pytest.raises(ValueError, match="b"):
        turns.run(TimedComputation(out.backward), TimedComputation(steps(turns, log, "b", 1, fails_at=0)))
    assert log == ["backward"] and x.grad is None
    turns.run(TimedComputation(GivesWay.apply(x).backward), TimedComputation(steps(turns, log, "b", 1)))
    assert log == ["backward", "backward", "b0", "again"] and x.grad.item() == 2


def test_only_the_running_one_is_timed():
    turns, log = Turns(CPU), []

    def timed(name):
        @contextlib.contextmanager
        def context():
            log.append(f"{name} begins")
            yield
            log.append(f"{name} ends")

        return context

    turns.run(
        TimedComputation(steps(turns, log, "a", 2), timed("a")), TimedComputation(steps(turns, log, "b", 1), timed("b"))
    )
    assert log == [
        *("a begins", "a0", "a ends", "b begins", "b0", "b ends"),
        *("a begins", "a1", "a ends"),
    ]


def test_a_switch_is_on_for_one_of_them():
    turns, switch, seen = Turns(CPU), Switch(), []

    def first():
        with contextlib.suppress(ValueError), switch.on():
            seen.append(("a", bool(switch)))
            turns.yield_turn()
            seen.append(("a", bool(switch)))
            raise ValueError
        seen.append(("a", bool(switch)))

    turns.run(TimedComputation(first), TimedComputation(lambda: seen.append(("b", bool(switch)))))
    assert seen == [("a", True), ("b", False), ("a", True), ("a", False)]


def test_gradients_are_recorded_in_both():
    """A new thread records them, whatever the thread that made it does."""
    turns, recorded = Turns(CPU), []
    with torch.no_grad():
        turns.run(
            TimedComputation(lambda: recorded.append(torch.is_grad_enabled())),
            TimedComputation(lambda: recorded.append(torch.is_grad_enabled())),
        )
    assert recorded == [False, True]
