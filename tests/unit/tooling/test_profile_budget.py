"""How the profile spends its time, and which placements of groups it measures."""

import pytest

from megatron.base.mesh import Mesh
from megatron.planner.time.hardware import Place, built_in, place
from megatron.tooling.profile.budget import LEAST, MOST, WARM_UPS, Budget, Sample, repeat, timed
from megatron.tooling.profile.messages import placements


def test_the_median_does_not_follow_an_outlier_and_the_spread_says_how_far_the_quartiles_are():
    sample = Sample.of([1.0, 1.0, 1.2, 0.8, 50.0])
    assert sample.median == 1.0
    assert sample.spread == pytest.approx(0.1)


def test_warm_ups_do_not_count():
    values = iter([99.0] * WARM_UPS + [1.0] * MOST)
    assert timed(lambda: next(values), 0.0) == Sample(1.0, 0.0)


def test_a_figure_is_repeated_a_few_times_without_time_and_not_for_ever():
    for seconds, expected in ((0.0, WARM_UPS + LEAST), (1e9, WARM_UPS + MOST)):
        calls = []
        repeat(lambda calls=calls: calls.append(None), seconds)
        assert len(calls) == expected


def test_what_has_no_time_left_is_named():
    budget = Budget(1e-9)
    assert not budget.allows("a product", 0.5)
    assert budget.left_out == ["a product"]
    assert Budget(1e9).allows("a product", 0.5)


@pytest.mark.parametrize(("world", "node"), [(1, 1), (2, 1), (2, 2), (4, 2), (8, 4), (12, 4), (16, 8)])
def test_every_placement_of_a_group_of_any_mesh_is_measured_once(world, node):
    found = placements(world, node)
    assert len(found) == len({each for _, each in found})
    cluster = built_in(f"h100:{world // node}x{node}")
    wanted = set()
    for tp in range(1, world + 1):
        for pp in range(1, world + 1):
            if world % (tp * pp) == 0:
                mesh = Mesh.create(world, tp=tp, pp=pp)
                wanted |= {place(mesh, cluster, (axis,)) for axis in ("tp", "dp", "pp") if mesh.size(axis) > 1}
    assert {each for _, each in found} == wanted
    for stride, each in found:  # the stride gives the placement
        mesh = Mesh.create(world, tp=stride, pp=world // (stride * each.size))
        assert place(mesh, cluster, ("dp",)) == each
    assert all(isinstance(each, Place) for _, each in found)
