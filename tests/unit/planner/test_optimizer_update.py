"""The time of an offloaded optimizer: copies, the CPU's update, and what hides them."""

import dataclasses

import pytest

from megatron.config.optimizer_offload import OptimizerOffloadConfig
from megatron.planner.time.constants import Constants
from megatron.planner.time.data_sheet import CPU_UPDATE_BYTES, CPU_UPDATE_RATE
from tests.unit.planner.test_step_time import H100, OVERLAPPED, PP, SHARDED, model_of, time_of

STATES = OptimizerOffloadConfig(offload_optimizer_states=True)
ON_CPU = OptimizerOffloadConfig(optimizer_cpu_offload=True)
HALF = OptimizerOffloadConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
LATE = OptimizerOffloadConfig(optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True)
HALF_LATE = dataclasses.replace(HALF, overlap_cpu_optimizer_d2h_h2d=True)
MODES = {"states": STATES, "cpu": ON_CPU, "half": HALF, "late": LATE, "half late": HALF_LATE}
LAYOUTS = {
    "one": (1, {}),
    "sharded": (16, SHARDED),
    "overlapped": (16, OVERLAPPED),
    "pipeline": (8, {**PP, **OVERLAPPED}),
}


def optimizer_seconds(layout, mode, **kwargs):
    return time_of(*LAYOUTS[layout], optimizer_offload=MODES[mode], batch=16, **kwargs).parts["optimizer"]


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("layout", list(LAYOUTS))
class TestModes:
    def test_parts_add_up_and_offload_costs(self, layout, mode):
        plain, found = (
            time_of(*LAYOUTS[layout], batch=16, **parts) for parts in ({}, {"optimizer_offload": MODES[mode]})
        )
        assert found.seconds == pytest.approx(sum(found.parts.values()), rel=1e-12)
        assert found.seconds - found.parts["optimizer"] - found.parts["straggler"] == pytest.approx(
            plain.seconds - plain.parts["optimizer"] - plain.parts["straggler"], rel=1e-12
        )
        model = model_of(*LAYOUTS[layout], batch=16, optimizer_offload=MODES[mode])
        clock = model.clock(Constants())
        assert float(model.seconds(clock)[0]) == pytest.approx(model.time(clock).seconds, rel=1e-12)

    @pytest.mark.parametrize("change", ["host", "host_rate"])
    def test_a_faster_host_is_never_slower(self, layout, mode, change):
        times = [
            optimizer_seconds(layout, mode, cluster=dataclasses.replace(H100, **{change: rate * 1e9}))
            for rate in (5, 20, 80, 320, 1280)
        ]
        assert times == sorted(times, reverse=True)


class TestOneDevice:
    def test_states_are_copied_in_both_directions_at_once(self):
        parameters = model_of().replicas.held[0].all
        copies = 12 * parameters / H100.host
        found = optimizer_seconds("one", "states")
        assert copies < found < 1.02 * copies  # and the first and last chunk

    def test_the_cpu_is_limited_by_its_memory(self):
        parameters = model_of().replicas.held[0].all
        update = CPU_UPDATE_BYTES * parameters / (CPU_UPDATE_RATE * H100.host_rate / 8)
        assert update < optimizer_seconds("one", "cpu") < 1.02 * update
        assert optimizer_seconds("one", "half") == pytest.approx(update / 2, rel=0.02)

    def test_by_the_link_where_it_is_slower(self):
        cluster = dataclasses.replace(H100, host_rate=1e15)
        parameters = model_of().replicas.held[0].all
        gradients = 4 * parameters / H100.host
        assert gradients < optimizer_seconds("one", "cpu", cluster=cluster) < 1.02 * gradients

    def test_and_by_the_device_where_nothing_else_is_slow(self):
        cluster = dataclasses.replace(H100, host_rate=1e15, host=1e15)
        model = model_of()
        half = model.clock(Constants()).update(model.replicas.held[0].all / 2)
        assert optimizer_seconds("one", "half", cluster=cluster) == pytest.approx(half)


class TestOverlap:
    def test_the_next_forward_hides_an_update(self):
        """Until it reads the last parameter; the first chunk has less time, and half of them more than all."""
        model = model_of(micro_batch=8, seq=8192, optimizer_offload=LATE, batch=16)
        clock = model.clock(Constants())
        forward = model.stages(clock)[0].forward.total
        update = clock.cpu_update(model.replicas.held[0].all)
        found = model.time(clock).parts["optimizer"]
        assert found == pytest.approx(update - forward, rel=0.05)
        long = {"micro_batch": 8, "seq": 8192}
        assert optimizer_seconds("one", "half late", **long) < 0.55 * found

    def test_copies_that_outlast_the_backward_are_added(self):
        slow = dataclasses.replace(H100, host=1e8)
        model = model_of(optimizer_offload=LATE, cluster=slow, batch=16)
        copies = 4 * model.replicas.held[0].all / 1e8
        assert model.time(model.clock(Constants())).parts["optimizer"] > 0.99 * copies

    def test_parameters_that_are_gathered_before_the_forward_cannot_wait(self):
        now, later = (
            time_of(16, parallel, batch=16, optimizer_offload=LATE, micro_batch=1).parts["optimizer"]
            for parallel in ({**SHARDED, "overlap_grad_reduce": True}, OVERLAPPED)
        )
        assert later < now
