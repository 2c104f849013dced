"""The options of a rank's layers, the price of offloading one, and the choice among them."""

import pytest

from megatron.base.errors import ConfigError
from megatron.config.recompute import KEEP_ALL, NORM
from megatron.planner.memory.balance import Option
from megatron.planner.memory.rank_choice import CopyTimes, LayerOption, LayerTimes, choose, with_offload
from megatron.planner.memory.recompute_options import RECOMPUTE_WHOLE_LAYER, part_sets
from megatron.planner.search.axis import recompute_choices
from megatron.schedule.partition import Stage
from megatron.spec.decoder import decoder_spec
from tests.unit.config.runs import make_run

OPTIONS = [
    LayerOption(Option("keep", 100, 0.0), KEEP_ALL),
    LayerOption(Option("layer", 10, 3.0), RECOMPUTE_WHOLE_LAYER),
]
TIMES = LayerTimes(forward=1.0, backward=5.0)
STAGE = Stage(0, range(4), embedding=True, head=True)


def chosen(options, budget, stages=(STAGE,), in_flight=1.0):
    layers = [number for stage in stages for number in stage.layers]
    return choose(dict.fromkeys(layers, options), stages, 2, in_flight, budget)


@pytest.mark.parametrize(
    ("to_host", "to_device", "seconds"), [(0.01, 0.05, 0.0), (0.03, 0.05, 2.0), (0.01, 0.06, 1.0), (0.03, 0.06, 3.0)]
)
def test_an_offload_costs_the_time_by_which_copies_exceed_forward_and_backward(to_host, to_device, seconds):
    offloaded = with_offload(OPTIONS, TIMES, lambda nbytes: CopyTimes(nbytes * to_host, nbytes * to_device))
    assert offloaded[:2] == OPTIONS and offloaded[2].offloaded == 100
    assert offloaded[2].option.name == "keep (offloaded)" and offloaded[2].option.nbytes == 0
    assert offloaded[2].option.seconds == pytest.approx(seconds)
    assert offloaded[3].option.seconds == 3.0 and offloaded[3].config is RECOMPUTE_WHOLE_LAYER  # 10 bytes are hidden


def test_the_last_two_layers_of_each_stage_stay():
    free = with_offload(OPTIONS, TIMES, lambda nbytes: CopyTimes(0.0, 0.0))
    stages = (STAGE, Stage(3, range(8, 11), embedding=False, head=True))
    found = chosen(free, 0.6, stages)
    assert found.layers.offloaded == {0, 1, 8} and found.choice.seconds == 0.0
    assert set(found.layers.of_layer) == {0, 1, 2, 3, 8, 9, 10}


def test_a_share_is_of_the_bytes_without_recompute_and_counts_what_is_in_flight():
    found = chosen(OPTIONS, 0.5, in_flight=3.0)
    assert (found.keep, found.budget) == (1200, 600.0)
    assert found.choice.nbytes == 300 + 3 * 30 <= 600
    assert found.choice.counts() == {"keep": 1, "layer": 3} and str(found) == "3 x layer, 1 x keep"
    assert chosen(OPTIONS, 600.0, in_flight=3.0).options == found.options
    halves = (Stage(0, range(2), embedding=True, head=False), Stage(1, range(2, 4), embedding=False, head=True))
    assert chosen(OPTIONS, 0.5, halves, in_flight=3.0).keep == 600  # each chunk keeps what its own stage's layers keep


def test_too_small_a_budget_names_the_rank_and_the_least():
    with pytest.raises(
        ConfigError, match=r"--activation-memory-budget 39 is 0\.0 MiB on pipeline rank 2, whose layers"
    ):
        chosen(OPTIONS, 39.0)


def test_a_rank_without_layers_has_nothing_to_choose():
    found = chosen(OPTIONS, 0.5, (Stage(0, range(0), embedding=True, head=False),))
    assert found.options == {} and found.choice.options == () and str(found) == ""


@pytest.mark.parametrize("shared", [False, True])
def test_a_norm_that_attention_and_mlp_share_is_never_computed_again(shared):
    run = make_run(parallel_residual=True, shared_norm=shared, max_position_embeddings=64)
    sets = [config.modules for config in part_sets(decoder_spec(run.model).layers[0])]
    sets_of_search = [set(choice.split("+")) for choice in recompute_choices(run, 1)]
    for choices in (sets, sets_of_search):
        assert any(NORM in parts for parts in choices) is not shared
