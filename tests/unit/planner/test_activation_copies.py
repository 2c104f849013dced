"""The time of activation offload: nothing while copies hide, and what outlasts the computation beside them
otherwise."""

import dataclasses

import numpy as np
import pytest

from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.planner.memory.plan import plan_memory
from megatron.planner.time.activation_copies import activation_copies, scheduled_copies
from megatron.planner.time.constants import Constants
from megatron.schedule.simulate import simulate
from megatron.spec.sizes import Target
from tests.unit.planner.test_step_time import H100, PP, model_of, run_of, time_of

HALF = ActivationOffloadConfig(pipeline_offload_ratio="0.5")
AUTO = ActivationOffloadConfig(pipeline_offload_ratio="auto")
LAYERS = ActivationOffloadConfig(cpu_offloading=True, cpu_offloading_num_layers=6)
PARTS_OF_LAYERS = ActivationOffloadConfig(
    fine_grained_activation_offloading=True, offload_modules=("core_attn", "mlp_act")
)
WAYS = {"ratio": HALF, "layers": LAYERS, "modules": PARTS_OF_LAYERS}


def link(gb_per_s):
    return dataclasses.replace(H100, host=gb_per_s * 1e9)


CASES = [
    *((way, (1, {})) for way in WAYS),
    ("ratio", (4, PP)),
    ("modules", (2, {"pipeline_model_parallel_size": 2})),
    ("ratio", (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2})),
]


@pytest.mark.parametrize(("way", "layout"), CASES)
class TestWays:
    def test_a_fast_link_hides_all_and_a_slow_one_does_not(self, way, layout):
        plain = time_of(*layout, batch=16)
        fast, slow = (
            time_of(*layout, batch=16, activation_offload=WAYS[way], cluster=link(rate)) for rate in (1e9, 1.0)
        )
        assert fast.seconds == pytest.approx(plain.seconds, rel=1e-12)
        assert slow.seconds == pytest.approx(sum(slow.parts.values()), rel=1e-12)
        assert slow.parts["offload"] > 0.5 * slow.seconds

    def test_a_faster_link_is_never_slower(self, way, layout):
        seconds = [
            time_of(*layout, batch=16, activation_offload=WAYS[way], cluster=link(rate)).seconds
            for rate in (5, 10, 20, 40, 80)
        ]
        assert seconds == sorted(seconds, reverse=True)


class TestLayerByLayer:
    def test_what_a_layer_exposes(self):
        """Out during the next layer's forward, back during the backward of the layer after: 6 of 8 layers move."""
        model = model_of(activation_offload=LAYERS, cluster=link(2.0))
        clock = model.clock(Constants())
        layer, moved = model.layer(clock, 0), activation_copies(*run_of(activation_offload=LAYERS), model.work.spec)
        sizes = moved.by_layer[0]
        assert [bool(nbytes) for nbytes in sizes] == [True] * 6 + [False] * 2
        exposed = 0.0
        for nbytes in sizes[:6]:
            copy = nbytes / 2e9
            exposed += max(0.0, copy - layer.forward.total)
            exposed += max(0.0, copy - layer.input_grad.total - layer.weight_grad.total)
        assert exposed > 0
        assert model.time(clock).parts["offload"] == pytest.approx(64 * exposed, rel=1e-9)

    def test_bytes_are_those_of_the_memory_plan(self):
        run, settings = run_of(activation_offload=LAYERS)
        copies = activation_copies(run, settings, model_of().work.spec)
        assert sum(copies.by_layer[0]) == plan_memory(run, settings, Target(cpu=False))[0].host


class TestSchedule:
    LAYOUT = (4, PP)

    @pytest.mark.parametrize("batch", [12, 48])
    def test_copies_are_played_like_the_engine_runs_them(self, batch):
        """The makespan is that of the run's own list of actions with the planned costs."""
        model = model_of(*self.LAYOUT, batch=batch, activation_offload=HALF, cluster=link(5.0))
        clock = model.clock(Constants())
        play = model.prepare(clock).play
        _, settings = run_of(*self.LAYOUT, batch=batch, activation_offload=HALF)
        simulated = simulate(settings.pipeline.schedule_of(batch, offload=True), play.costs).makespan
        assert float(np.squeeze(model.seconds(clock))) == pytest.approx(
            (simulated + float(model.prepare(clock).outside)) * float(model.prepare(clock).factor), rel=1e-9
        )

    def test_microbatches_that_the_schedule_does_not_move_go_layer_by_layer(self):
        model = model_of(*self.LAYOUT, activation_offload=HALF)
        moved = scheduled_copies(model.prepare(model.clock(Constants())).play.shape, 64)
        assert moved[0] > 60 and moved[3] == 0

    def test_saved_bytes_are_those_of_the_memory_plan(self):
        run, settings = run_of(*self.LAYOUT, activation_offload=HALF)
        copies = activation_copies(run, settings, model_of(*self.LAYOUT).work.spec)
        ranks = plan_memory(run, settings, Target(cpu=False))
        assert list(copies.saved) == [rank.per_microbatch for rank in ranks]


class TestAuto:
    @pytest.mark.parametrize(
        ("layout", "rate"), [((1, {}), 30), ((4, PP), 10), ((4, {**PP, "pipeline_schedule": "zb-h1"}), 10)]
    )
    def test_the_largest_ratio_that_costs_no_time(self, layout, rate):
        cluster = link(rate)
        plain = time_of(*layout, batch=16, cluster=cluster)
        model = model_of(*layout, batch=16, activation_offload=AUTO, cluster=cluster)
        clock = model.clock(Constants())
        ratio = model.offload_ratio(clock)
        assert model.time(clock).seconds == pytest.approx(plain.seconds, rel=1e-12)
        assert 0 < ratio < 0.9
        asked, all_of_it = (
            time_of(
                *layout,
                batch=16,
                cluster=cluster,
                activation_offload=ActivationOffloadConfig(pipeline_offload_ratio=given),
            )
            for given in (f"{ratio}", "1")
        )
        assert asked.seconds == pytest.approx(plain.seconds, rel=1e-5)
        assert all_of_it.seconds > plain.seconds * 1.001

    def test_none_without_the_flag(self):
        model = model_of(activation_offload=HALF)
        assert model.offload_ratio(model.clock(Constants())) is None
