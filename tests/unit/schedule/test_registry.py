"""What every registered schedule says of itself is true of the lists that it builds."""

import pytest

from megatron.base.errors import ConfigError
from megatron.schedule.costs import Costs
from megatron.schedule.passes import with_transfers
from megatron.schedule.registry import SCHEDULES, schedule_or_default
from megatron.schedule.schedule import Kind
from megatron.schedule.simulate import simulate
from megatron.schedule.spec import Times
from megatron.schedule.validate import check

SIZES = [(1, 3), (2, 1), (4, 8), (3, 11)]


def virtual_stages(spec):
    return spec.virtual_stages or 3


@pytest.mark.parametrize("spec", SCHEDULES.values(), ids=SCHEDULES)
class TestEach:
    @pytest.mark.parametrize(("p", "m"), SIZES)
    def test_what_it_says_of_its_lists(self, spec, p, m):
        v = virtual_stages(spec)
        schedule = spec.build(p, m, v=v)
        assert (schedule.name, schedule.num_microbatches) == (spec.name, m)
        assert schedule.placement == spec.placement(p, v) and schedule.placement.num_stages == p * v
        kinds = {action.kind for actions in schedule.actions for action in actions}
        halves = {Kind.INPUT_GRAD, Kind.WEIGHT_GRAD} if spec.splits_backward else {Kind.BACKWARD}
        assert kinds == {Kind.FORWARD, *halves}

    @pytest.mark.parametrize("overlap", [True, False])
    @pytest.mark.parametrize(("p", "m"), SIZES)
    def test_it_runs(self, spec, p, m, overlap):
        check(with_transfers(spec.build(p, m, v=virtual_stages(spec)), overlap=overlap), blocking=not overlap)

    @pytest.mark.parametrize("times", [Times(1.0, 1.0, 1.0), Times(1.0, 1.25, 0.75)])
    @pytest.mark.parametrize(("p", "m"), SIZES)
    def test_its_formula_is_what_the_simulator_finds(self, spec, p, m, times):
        v = virtual_stages(spec)
        formula = spec.bubble(spec.sizes(p, m, v), times)
        timeline = simulate(spec.build(p, m, v=v), Costs.uniform(p * v, **times._asdict()))
        bubbles = [timeline.bubble(rank) for rank in range(p)]
        if formula is not None:
            assert sum(bubbles) / p == pytest.approx(formula.value)

    def test_a_group_where_it_would_change_nothing(self, spec):
        v = virtual_stages(spec)
        if spec.takes_groups:
            assert spec.build(2, 8, v=v, group=4).actions != spec.build(2, 8, v=v).actions
        else:
            with pytest.raises(ConfigError, match=f"has no effect under schedule {spec.name}; remove it"):
                spec.build(2, 8, group=4)


@pytest.mark.parametrize(
    ("name", "v", "message"),
    [
        ("interleaved", None, "needs 2 or more virtual stages"),
        ("interleaved", 1, "needs 2 or more virtual stages"),
        ("1f1b", 2, "has 1 virtual stage per rank, not 2"),
        ("zb-v", 3, "has 2 virtual stages per rank, not 3"),
    ],
)
def test_virtual_stages_that_do_not_fit(name, v, message):
    with pytest.raises(ConfigError, match=message):
        SCHEDULES[name].build(4, 8, v=v)


def test_names_and_defaults():
    assert all(spec.name == name for name, spec in SCHEDULES.items())
    assert schedule_or_default("zb-v", None) is SCHEDULES["zb-v"]
    assert [schedule_or_default(None, v).name for v in (None, 1, 2, 4)] == [
        "1f1b",
        "1f1b",
        "interleaved",
        "interleaved",
    ]
