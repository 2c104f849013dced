"""The choice of --recompute-policy balanced by predicted times and bytes."""

import pytest

from megatron.base.errors import ConfigError
from megatron.config.recompute import RecomputeConfig
from megatron.planner.time.balanced_layers import balanced_layers
from megatron.planner.time.constants import fitted
from megatron.planner.time.data_sheet import DataSheetClock
from megatron.planner.time.model_work import places_of
from megatron.planner.time.software import Software
from megatron.planner.time.step_time import StepModel, model_of_run
from megatron.spec.memory.layer import LayerMemory
from tests.unit.planner.test_activation_copies import link
from tests.unit.planner.test_step_time import H100, PP, run_of


def balanced(budget):
    return RecomputeConfig(recompute_policy="balanced", activation_memory_budget=budget)


def seconds(recompute, layout=(1, {}), cluster=H100, batch=8):
    run, settings = run_of(*layout, batch=batch, recompute=recompute)
    clock = DataSheetClock(fitted(), cluster)
    time = model_of_run(run, settings, cluster, Software(), clock).time(clock)
    assert time.seconds == pytest.approx(sum(time.parts.values()), rel=1e-12)
    return time.seconds


def choice(budget, layout=(1, {}), cluster=H100):
    run, settings = run_of(*layout, batch=8, recompute=balanced(budget))
    clock, places = DataSheetClock(fitted(), cluster), places_of(settings, cluster)
    return balanced_layers(run, settings, Software(), clock, places)


@pytest.mark.parametrize("layout", [(1, {}), (4, {**PP})])
def test_less_memory_is_never_faster(layout):
    slow = link(1.0)  # so that recompute is cheaper than offload
    found = [seconds(balanced(budget), layout, slow) for budget in (1.0, 0.8, 0.6, 0.4, 0.2)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(seconds(RecomputeConfig(), layout, slow), rel=1e-12)
    full = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert found[0] < found[2] < seconds(full, layout, slow)


def test_a_budget_is_kept():
    layer = run_of(batch=8)[0]
    assert layer.model.num_layers == 8
    chosen = choice(0.5, cluster=link(0.01))
    run, settings = run_of(batch=8, recompute=balanced(0.5))
    model = StepModel(run, settings, H100, Software(), chosen)
    kept = []
    for number, config in chosen.choices.of_layer.items():
        memory = LayerMemory(model.work.spec.layers[number], model.work.sizes, config.modules)
        kept.append(model.work.sizes.residual if config.is_full else sum(memory.kept_by_part().values()))
    all_of_them = 8 * sum(LayerMemory(model.work.spec.layers[0], model.work.sizes, frozenset()).kept_by_part().values())
    assert not chosen.offloaded
    assert 0.4 * all_of_them < sum(kept) <= 0.5 * all_of_them


def test_a_fast_link_offloads_all_but_the_last_two_layers():
    chosen = choice(0.3, cluster=link(1e6))
    assert set(chosen.offloaded) <= set(range(6)) and len(chosen.offloaded) >= 5
    assert seconds(balanced(0.3), cluster=link(1e6)) == pytest.approx(seconds(RecomputeConfig()), rel=1e-6)


def test_too_small_a_budget():
    with pytest.raises(ConfigError, match="--activation-memory-budget 1000 is"):
        choice(1000.0)


def test_a_table_of_runs_has_no_choice():
    run, settings = run_of(recompute=balanced(0.5))
    with pytest.raises(ConfigError, match="balanced"):
        StepModel(run, settings, H100, Software())
