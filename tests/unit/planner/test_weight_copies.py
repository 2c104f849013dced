"""The time of weights that live in host memory: copies that hide behind the layers that use the bucket before, or do
not."""

import dataclasses

import pytest

from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.optimizer_offload import OptimizerOffloadConfig
from megatron.planner.time.constants import Constants
from tests.unit.planner.test_activation_copies import link
from tests.unit.planner.test_step_time import OVERLAPPED, PP, SHARDED, ZERO_3, model_of, time_of

WEIGHTS = ActivationOffloadConfig(cpu_offloading_weights=True, cpu_offloading_num_layers=2)
ALL = dataclasses.replace(WEIGHTS, cpu_offloading_num_layers=8)
LAYOUTS = {
    "one": (1, {}),
    "sharded": (16, SHARDED),
    "zero3": (16, ZERO_3),
    "pipeline": (8, {**PP, **OVERLAPPED}),
}


@pytest.mark.parametrize("name", list(LAYOUTS))
class TestLayouts:
    def test_parts_add_up(self, name):
        time = time_of(*LAYOUTS[name], activation_offload=WEIGHTS, cluster=link(2.0))
        assert time.seconds == pytest.approx(sum(time.parts.values()), rel=1e-12)
        assert time.seconds > time_of(*LAYOUTS[name], cluster=link(2.0)).seconds

    def test_a_faster_link_is_never_slower(self, name):
        seconds = [
            time_of(*LAYOUTS[name], batch=16, activation_offload=WEIGHTS, cluster=link(rate)).seconds
            for rate in (1, 5, 25, 125, 1e6)
        ]
        assert seconds == sorted(seconds, reverse=True)
        # Gathers in every microbatch remain.
        assert seconds[-1] < 1.05 * time_of(*LAYOUTS[name], batch=16).seconds


def test_what_a_bucket_exposes():
    """Of n buckets n - 1 are copied in a forward and in a backward of the only stage."""
    model = model_of(activation_offload=ALL, cluster=link(0.5), batch=8)
    clock = model.clock(Constants())
    layers = model.work.spec.layers
    parameters = model.replicas.held[0].all - 2 * 32000 * 2048 - 2048
    count = parameters // model.replicas.bucket_size
    assert count > 2 and len(layers) == 8
    copy, layer = 2 * parameters / count / 0.5e9, model.layer(clock, 0)
    forward, backward = layer.forward.total, layer.input_grad.total + layer.weight_grad.total
    exposed = (count - 1) * (max(0.0, copy - 8 / count * forward) + max(0.0, copy - 8 / count * backward))
    assert exposed > 0
    assert model.time(clock).parts["offload"] == pytest.approx(8 * exposed, rel=1e-9)


def test_the_update_copies_the_weights_out():
    slow = link(0.5)
    found = time_of(activation_offload=ALL, cluster=slow, batch=8).parts["optimizer"]
    model = model_of()
    share = 1 - (2 * 32000 * 2048 + 2048) / model.replicas.held[0].all
    copies = 2 * share * model.replicas.held[0].all / 0.5e9
    assert copies < found < 1.2 * copies


def test_the_cpu_writes_offloaded_weights_where_they_are():
    on_cpu = OptimizerOffloadConfig(optimizer_cpu_offload=True)
    cluster = dataclasses.replace(link(0.5), host_rate=1e15)
    both, one = (
        time_of(optimizer_offload=on_cpu, cluster=cluster, batch=8, **parts).parts["optimizer"]
        for parts in ({"activation_offload": ALL}, {})
    )
    assert both < one  # fewer results are copied behind the last chunk
