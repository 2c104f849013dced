"""Offloaded weights: when they are copied, what an update writes, and what it saves."""

import pytest
import torch

from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.host_pool import HostPool
from megatron.core.offload.saved_tensors import SavedParameter
from megatron.core.offload.weights import OffloadedShard
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from megatron.tooling.memory_check import LLAMA as LLAMA_FLAGS
from megatron.tooling.memory_check import measure
from tests.unit.models.builds import CPU, LLAMA
from tests.unit.offload.weights_run import RecordingEngine, Run

FIELDS = {**LLAMA, "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 64}  # no padding: a bucket is a layer


def offloaded_run(layers=2, events=None, directory=None, **fields):
    pool = HostPool(pinned=False, directory=directory)
    engine = RecordingEngine(Streams(CPU, Timeline(CPU)), [] if events is None else events)
    return Run({**FIELDS, **fields}, layers, pool, engine, CPU)


def recorded(run, events):
    """`events` with layers' forwards and backwards, and offloaded buckets by the number of their layer."""
    for number, layer in enumerate(run.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: events.append(("forward", number)))
        layer.register_full_backward_pre_hook(lambda *_, number=number: events.append(("backward", number)))
    offloaded = [bucket for bucket in reversed(run.data_parallel.buckets) if bucket.offloaded is not None]
    names = {str(bucket.index): number for number, bucket in enumerate(offloaded)}
    return lambda: [(what, names.get(name, name)) for what, name in events]


@pytest.mark.parametrize("bf16", [False, True])
def test_weights_are_prefetched_during_the_layer_before_them(bf16):
    events = []
    run = offloaded_run(events=events, bf16=bf16)
    found = recorded(run, events)
    run.step(0)
    forward = [("forward", 0), ("to device", 0), ("to device", 1), *(("forward", number) for number in (1, 2, 3))]
    # The last of the offloaded ones is still there from the forward. The first stays for the next microbatch.
    backward = [("backward", 3), ("backward", 2), ("backward", 1), ("to device", 0), ("backward", 0)]
    again = [("forward", 0), ("to device", 1), *(("forward", number) for number in (1, 2, 3))]
    assert found()[: len(forward + backward + again + backward)] == forward + backward + again + backward
    # Half-precision weights are rounded masters: an update need not read them. Then forward's first ones are
    # prefetched.
    update = found()[len(forward + backward + again + backward) :]
    read = [] if bf16 else [("to device", 0), ("to device", 1)]
    assert update == [*read, ("to host", 0), ("to host", 1), ("to device", 0), ("to device", 1)]
    events.clear()
    run.step(1)
    assert found()[:4] == [("forward", number) for number in range(4)], "they were prefetched during the update"


def test_more_layers_need_no_more_at_once():
    """All but the first and the last two are copied twice per microbatch."""
    events = []
    run = offloaded_run(4, events)
    found = recorded(run, events)
    run.step(0, microbatches=1)
    copies = [event for event in found() if event[0] in ("to device", "to host")]
    assert copies[:7] == [("to device", number) for number in (0, 1, 2, 3, 2, 1, 0)]
    update = [
        ("to device", 0),
        ("to device", 1),
        ("to host", 0),
        ("to device", 2),
        ("to host", 1),
        ("to device", 3),
        ("to host", 2),
        ("to host", 3),
    ]
    assert copies[7:] == [*update, ("to device", 0), ("to device", 1)]


@pytest.mark.parametrize("where", ["host", "files"])
@pytest.mark.parametrize("fields", [{}, {"bf16": True}, {"fp16": True}], ids=["fp32", "bf16", "fp16"])
def test_same_bits_and_nothing_grows(fields, where, tmp_path):
    resident = Run({**FIELDS, **fields}, 2, None, None, CPU)
    run = offloaded_run(directory=tmp_path if where == "files" else None, **fields)
    made = run.pool.num_allocated
    for number in range(4):
        assert run.step(number) == resident.step(number)
    expected = resident.weights()
    found = run.weights()
    assert all(found[name].equal(elements) for name, elements in expected.items())
    shards = [bucket.offloaded.shard for bucket in run.data_parallel.buckets if bucket.offloaded is not None]
    assert run.pool.num_allocated == made == len(shards) == 2
    assert run.pool.nbytes == sum(shard.nbytes for shard in shards)
    assert resident.device_bytes() - run.device_bytes() == run.pool.nbytes, "offloaded weights have left the device"


def test_an_update_leaves_other_elements_alone():
    shard = OffloadedShard(
        "weights", torch.arange(256.0), HostPool(pinned=False), CopyEngine(Streams(CPU, Timeline(CPU)))
    )
    shard.update([(64, torch.full((64,), -1.0)), (192, torch.full((64,), -2.0))])
    plain = torch.empty(256)
    shard.to_device(plain).wait()  # behind what is being stored
    expected = torch.arange(256.0)
    expected[64:128], expected[192:] = -1.0, -2.0
    assert plain.equal(expected)
    shard.synchronize()
    assert shard.shard.equal(expected)


class TestSavedParameters:
    def test_what_they_are_parts_of(self):
        run = offloaded_run()
        weight = run.layers[0].mlp.linear_fc1.weight  # read, so it is whole
        assert run.data_parallel.parameter_of(weight[1].t()) is weight
        assert run.data_parallel.parameter_of(weight.clone()) is None
        assert run.data_parallel.parameter_of(run.layers[3].mlp.linear_fc1.weight) is None, "it is resident"
        run.data_parallel.synchronize()
        assert weight.numel() == 0 and run.data_parallel.parameter_of(weight) is None

    def test_they_are_views_of_the_memory_of_that_moment(self):
        parameter = torch.nn.Parameter(torch.zeros(4, 6))
        view = parameter.detach().t()[2:]
        saved = SavedParameter(parameter, view.shape, view.stride(), view.storage_offset())
        block = torch.arange(100.0)
        parameter.data = block[7:31].view(4, 6)
        assert saved.tensor().equal(parameter.detach().t()[2:])
        parameter.data = torch.empty(0)
        with pytest.raises(AssertionError, match="not on the device"):
            saved.tensor()


LAYER = 4 * 128 * 128 + 3 * 128 * 320 + 2 * 128  # elements, and so the size of a bucket
SHAPE = "--num-layers 6 --hidden-size 128 --ffn-hidden-size 320 --seq-length 32 --vocab-size 256"
CASES = {
    "fp32": (4, ""),
    "bf16, 2 microbatches": (6, "--bf16 --global-batch-size 4"),
    "full recompute": (6, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
}


@pytest.mark.parametrize("name", CASES)
def test_planned_is_measured_and_the_device_has_less(name):
    layers, more = CASES[name]
    flags = f"{LLAMA_FLAGS} {SHAPE} --ddp-bucket-size {LAYER} {more}"
    plain = measure(0, 1, flags)
    offloaded = measure(0, 1, f"{flags} --cpu-offloading-weights --cpu-offloading-num-layers {layers}")
    assert offloaded.planned.peak == pytest.approx(offloaded.peak, rel=0.03), offloaded.planned.moment
    bucket = (2 if "bf16" in name else 4) * LAYER
    assert offloaded.planned.host == layers * bucket
    # One bucket is whole at the peak; two if that lies in an offloaded layer, or three if its layer is computed again.
    saved = plain.peak - offloaded.peak
    assert (layers - (3 if "recompute" in name else 2)) * bucket * 0.97 < saved <= (layers - 1) * bucket * 1.03
