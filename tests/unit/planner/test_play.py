"""Schedules of many microbatches, played by the block that they repeat, take as long as event by event."""

import dataclasses
import random

import numpy as np
import pytest

from megatron.planner.schedule.repeating_graph import RepeatingGraph
from megatron.planner.time import play
from megatron.planner.time.play import Play, PlayShape, makespans
from megatron.schedule.costs import Costs
from megatron.schedule.events import Events
from megatron.schedule.graph import ScheduleGraph
from megatron.schedule.registry import SCHEDULES

EXCHANGES = "forward_exchange", "backward_exchange"
PER_STAGE = ("forward", "input_grad", "weight_grad", "backward", "offload", "reload", "bucket", *EXCHANGES)
MODES = {"overlap": (True, False), "in order": (False, False), "blocking": (False, True)}
EXACT = 1e-12  # of a time; the issue asks for 1e-9
COLUMNS = 4


def shape_of(name, p, v, *, group=None, mode="overlap", buckets=2):
    spec = SCHEDULES[name]
    overlap, blocking = MODES[mode]
    return PlayShape(spec, p, spec.virtual_stages or v, group, overlap=overlap, blocking=blocking, buckets=buckets)


def costs_of(stages, seed):
    """The first column: stages that are alike, but the last one has more work. The others: any, with long transfers."""
    rng = np.random.default_rng(seed)
    found = {name: rng.uniform(0.7, 1.3, (stages, COLUMNS)) for name in PER_STAGE}
    for values in found.values():
        values[:, 0] = values[0, 0]
        values[-1, 0] *= 1.3
    found["backward"] = found["input_grad"] + found["weight_grad"]
    boundary = rng.random((stages - 1, COLUMNS)) * (0.05, 0.2, 0.5, 1.0)
    return Costs(**found, transfer=boundary, latency=0.1 * boundary)


def event_by_event(shape, m, costs):
    return ScheduleGraph(Events(shape.whole(m), shape.buckets, shape.blocking)).makespans(costs)


def check(shape, m, seed):
    costs = costs_of(shape.p * shape.v, seed)
    (found,) = makespans([Play(shape, m, costs)])
    whole = event_by_event(shape, m, costs)
    assert found == pytest.approx(whole, rel=EXACT), (shape, m)


def repeats(shape, m):
    return isinstance(play._graph(shape, m), RepeatingGraph)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize(("p", "v", "m"), [(1, 2, 9), (2, 3, 40), (4, 2, 61), (5, 2, 35)])
def test_as_long_as_event_by_event(name, p, v, m, mode):
    shape = shape_of(name, p, v, mode=mode)
    check(shape, m, p * m)
    assert repeats(shape, m) == (name != "gpipe")


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_copies_in_no_time_change_nothing(name, mode):
    shape = shape_of(name, 4, 2, mode=mode)
    costs = costs_of(shape.p * shape.v, 0)
    costs = dataclasses.replace(costs, offload=0 * costs.offload, reload=0 * costs.reload)
    with_copies = dataclasses.replace(shape, offload=True)
    assert with_copies.whole(40) != shape.whole(40)
    found, plain = makespans([Play(each, 40, costs) for each in (with_copies, shape)])
    assert found == pytest.approx(plain, rel=EXACT)


@pytest.mark.parametrize(("group", "m"), [(4, 46), (6, 60), (7, 64), (6, 63)])
def test_groups_of_microbatches_and_what_is_left_of_them(group, m):
    check(shape_of("interleaved", 4, 2, group=group), m, group)


def test_every_length():
    """From those that do not repeat anything to those that do."""
    for name in ("zb-h1", "interleaved"):
        shape = shape_of(name, 3, 2)
        for m in range(1, 30):
            check(shape, m, m)


def test_two_stages_that_are_almost_equally_slow():
    """The second of them holds up the first one only after many microbatches, so that the end shows late."""
    shape, m, stages = shape_of("interleaved", 4, 2), 400, 8
    costs = costs_of(stages, 0)
    for values in (costs.forward, costs.backward, costs.input_grad, costs.weight_grad):
        values[:] = 1.0
        values[2] = 1.2
        values[5] = 1.2 + 1e-4
    (found,) = makespans([Play(shape, m, costs)])
    whole = event_by_event(shape, m, costs)
    assert found == pytest.approx(whole, rel=EXACT)


def test_few_blocks_are_played(monkeypatch):
    """The time of a schedule does not grow with its microbatches."""
    counted = []
    times = play.RepeatingGraph.makespans

    def count(graph, costs):
        block = graph.block
        played = block.times
        monkeypatch.setattr(block, "times", lambda *given: counted.append(0) or played(*given), raising=False)
        return times(graph, costs)

    monkeypatch.setattr(play.RepeatingGraph, "makespans", count)
    costs = costs_of(8, 0)
    alike = Costs(**{field.name: getattr(costs, field.name)[:, :1] for field in dataclasses.fields(costs)})
    makespans([Play(shape_of("1f1b", 8, 1), 5000, alike)])
    assert 0 < len(counted) < 100


def test_plays_of_several_shapes_keep_their_order():
    costs = [costs_of(4, seed) for seed in range(3)]
    short, long = shape_of("1f1b", 4, 1), shape_of("zb-h1", 4, 1)
    plays = [Play(short, 30, costs[0]), Play(long, 30, costs[1]), Play(short, 30, costs[2]), Play(short, 8, costs[0])]
    together = makespans(plays)
    for given, found in zip(plays, together, strict=True):
        assert np.allclose(makespans([given])[0], found, rtol=EXACT, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6, 8, 11, 16])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_grid_of_sizes(name, p):
    """All modes, numbers of stages and buckets, and lengths up to 256."""
    rng = random.Random(p)
    for v in (2, 3, 6) if SCHEDULES[name].virtual_stages is None else (1,):
        for mode in MODES:
            for m in {*rng.sample(range(1, 257), 3), 256}:
                group = rng.randrange(p, 2 * p + 3) if name == "interleaved" and rng.random() < 0.5 else None
                shape = shape_of(name, p, v, group=group, mode=mode, buckets=rng.choice((1, 3)))
                check(shape, m, m)
