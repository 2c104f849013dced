"""Weights in far memory: when they travel, what an update writes, and what it saves."""

import pytest
import torch

from benchmarks.memory_report import LLAMA as LLAMA_FLAGS
from benchmarks.memory_report import measure
from megatron.core.memory.copier import ThreadCopier
from megatron.core.memory.far_weights import FarShard
from megatron.core.memory.saved import SavedParameter
from megatron.core.memory.tiers import FarMemory
from megatron.core.timeline import Timeline
from tests.unit.memory.far_weights import RecordingCopier, Run
from tests.unit.models.builds import CPU, LLAMA

FIELDS = {**LLAMA, "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 64}  # no padding: a bucket is a layer


def far_run(layers=2, events=None, directory=None, **fields):
    far = FarMemory(pinned=False, directory=directory)
    copier = RecordingCopier(Timeline(CPU), [] if events is None else events)
    return Run({**FIELDS, **fields}, layers, far, copier, CPU)


def recorded(run, events):
    """`events` with layers' forwards and backwards, and far buckets by the number of their layer."""
    for number, layer in enumerate(run.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: events.append(("forward", number)))
        layer.register_full_backward_pre_hook(lambda *_, number=number: events.append(("backward", number)))
    far = [bucket for bucket in reversed(run.data_parallel.buckets) if bucket.home is not None]
    names = {str(bucket.index): number for number, bucket in enumerate(far)}
    return lambda: [(what, names.get(name, name)) for what, name in events]


@pytest.mark.parametrize("bf16", [False, True])
def test_weights_travel_beside_the_layer_before_them(bf16):
    events = []
    run = far_run(events=events, bf16=bf16)
    found = recorded(run, events)
    run.step(0)
    forward = [("forward", 0), ("in", 0), ("in", 1), *(("forward", number) for number in (1, 2, 3))]
    # The last of the far ones is still there from the forward. The first stays for the next microbatch.
    backward = [("backward", 3), ("backward", 2), ("backward", 1), ("in", 0), ("backward", 0)]
    again = [("forward", 0), ("in", 1), *(("forward", number) for number in (1, 2, 3))]
    assert found()[: len(forward + backward + again + backward)] == forward + backward + again + backward
    # Half-precision weights are rounded masters: an update need not read them. Then forward's first ones travel.
    update = found()[len(forward + backward + again + backward) :]
    read = [] if bf16 else [("in", 0), ("in", 1)]
    assert update == [*read, ("out", 0), ("out", 1), ("in", 0), ("in", 1)]
    events.clear()
    run.step(1)
    assert found()[:4] == [("forward", number) for number in range(4)], "they came during the update"


def test_more_layers_need_no_more_at_once():
    """All but the first and the last two travel twice a microbatch."""
    events = []
    run = far_run(4, events)
    found = recorded(run, events)
    run.step(0, microbatches=1)
    copies = [event for event in found() if event[0] in ("in", "out")]
    assert copies[:7] == [("in", number) for number in (0, 1, 2, 3, 2, 1, 0)]
    update = [("in", 0), ("in", 1), ("out", 0), ("in", 2), ("out", 1), ("in", 3), ("out", 2), ("out", 3)]
    assert copies[7:] == [*update, ("in", 0), ("in", 1)]


@pytest.mark.parametrize("where", ["host", "files"])
@pytest.mark.parametrize("fields", [{}, {"bf16": True}, {"fp16": True}], ids=["fp32", "bf16", "fp16"])
def test_same_bits_and_nothing_grows(fields, where, tmp_path):
    near, far = Run({**FIELDS, **fields}, 2, None, None, CPU), None
    far = far_run(directory=tmp_path if where == "files" else None, **fields)
    made = far.far.made
    for number in range(4):
        assert far.step(number) == near.step(number)
    expected = near.weights()
    found = far.weights()
    assert all(found[name].equal(elements) for name, elements in expected.items())
    homes = [bucket.home.shard for bucket in far.data_parallel.buckets if bucket.home is not None]
    assert far.far.made == made == len(homes) == 2
    assert far.far.nbytes == sum(shard.nbytes for shard in homes)
    assert near.near_bytes() - far.near_bytes() == far.far.nbytes, "what is away is not here as well"


def test_a_home_keeps_what_is_not_stored():
    shard = FarShard("weights", torch.arange(256.0), FarMemory(pinned=False), ThreadCopier(Timeline(CPU)))
    shard.store([(64, torch.full((64,), -1.0)), (192, torch.full((64,), -2.0))])
    near = torch.empty(256)
    shard.bring(near).wait()  # behind what is being stored
    expected = torch.arange(256.0)
    expected[64:128], expected[192:] = -1.0, -2.0
    assert near.equal(expected)
    shard.settle()
    assert shard.shard.equal(expected)


class TestSavedParameters:
    def test_what_they_are_parts_of(self):
        run = far_run()
        weight = run.layers[0].mlp.linear_fc1.weight  # read, so it is whole
        assert run.data_parallel.parameter_of(weight[1].t()) is weight
        assert run.data_parallel.parameter_of(weight.clone()) is None
        assert run.data_parallel.parameter_of(run.layers[3].mlp.linear_fc1.weight) is None, "it never goes"
        run.data_parallel.settle()
        assert weight.numel() == 0 and run.data_parallel.parameter_of(weight) is None

    def test_they_are_views_of_the_memory_of_that_moment(self):
        parameter = torch.nn.Parameter(torch.zeros(4, 6))
        view = parameter.detach().t()[2:]
        saved = SavedParameter(parameter, view.shape, view.stride(), view.storage_offset())
        block = torch.arange(100.0)
        parameter.data = block[7:31].view(4, 6)
        assert saved.tensor().equal(parameter.detach().t()[2:])
        parameter.data = torch.empty(0)
        with pytest.raises(AssertionError, match="not there"):
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
    near = measure(0, 1, flags)
    far = measure(0, 1, f"{flags} --cpu-offloading-weights --cpu-offloading-num-layers {layers}")
    assert far.planned.peak == pytest.approx(far.peak, rel=0.03), far.planned.moment
    bucket = (2 if "bf16" in name else 4) * LAYER
    assert far.planned.host == layers * bucket
    # One bucket is whole at the peak; two where that lies in a far layer, or a third where its layer is computed again.
    saved = near.peak - far.peak
    assert (layers - (3 if "recompute" in name else 2)) * bucket * 0.97 < saved <= (layers - 1) * bucket * 1.03
