"""Parameters in buckets, and gradients that land there, with one process."""

import pytest
import torch
from torch import nn

from megatron.config.data_parallel import DataParallelSettings
from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.parameter import Parameter, make_parameter
from megatron.spec.buckets import plan_buckets
from megatron.spec.parameter import Init, ParamSpec
from tests import pool
from tests.unit.models.builds import (
    CPU,
    GPT,
    LLAMA,
    accumulate,
    assemble,
    assert_gradients,
    differentiate,
    losses,
    make_data_parallel,
    make_ids,
    make_model,
    pieces,
)
from tests.unit.silent_groups import silent_groups

MODES = {
    "serial": {},
    "overlapped": {"overlap_reduce": True},
    "freed": {"mode": "every-microbatch", "shards": "optim_grads", "overlap_reduce": True},
}
each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def parameters(*shapes, dtype=torch.float32):
    """p0, p1, ... full of 1, 2, ..."""
    groups, init = pool.groups(), Init("normal", 1.0)
    made = {f"p{n}": make_parameter(ParamSpec(s, init), groups, dtype=dtype, device=CPU) for n, s in enumerate(shapes)}
    for number, parameter in enumerate(made.values()):
        nn.init.constant_(parameter, number + 1.0)
    return made


class Holder(nn.Module):
    """A module of just these parameters, registered in order."""

    def __init__(self, parameters):
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)


def held(found, bucket_size, **settings):
    settings = DataParallelSettings(bucket_size=bucket_size, **settings)
    return DataParallel(Holder(found), pool.groups(), settings, CPU)


def used(bucket):
    """Which elements of the bucket are a parameter's."""
    mask = torch.zeros(bucket.size, dtype=torch.bool)
    for name in bucket.parameters:
        bucket.view_of(mask, name).fill_(True)
    return mask


class TestParameters:
    def test_they_move_in_with_their_values(self):
        found = parameters((3, 5), (70,), (2, 2, 2))
        buckets = held(found, bucket_size=100).buckets
        assert [list(bucket.parameters) for bucket in buckets] == [["p2", "p1"], ["p0"]], "the reverse of registration"
        elements = 0
        for bucket in buckets:
            for name, parameter in bucket.parameters.items():
                assert parameter is found[name] and parameter.eq(float(name[1:]) + 1.0).all()
                assert bucket.view_of(bucket.whole, name).data_ptr() == parameter.data_ptr()
                assert parameter.data_ptr() % 64 == 0
                slot = parameter.slot
                assert slot.fresh and slot.main_grad.shape == parameter.shape and slot.main_grad.dtype == torch.float32
                assert bucket.view_of(bucket.grads, name).data_ptr() == slot.main_grad.data_ptr()
            mask = used(bucket)
            elements += int(mask.sum())
            assert bucket.whole[~mask].eq(0).all() and bucket.grads[~mask].eq(0).all()
        assert elements == 15 + 70 + 8

    def test_a_bucket_has_one_dtype(self):
        """In the order in which backward completes them, whatever their dtype."""
        found = parameters((40,), (50,), (60,))
        found["low"] = parameters((70,), dtype=torch.bfloat16)["p0"]
        found["last"] = parameters((80,))["p0"]
        buckets = held(found, bucket_size=120).buckets
        assert [list(bucket.parameters) for bucket in buckets] == [["last"], ["low"], ["p2", "p1"], ["p0"]]
        for bucket in buckets:
            half = "low" in bucket.parameters
            assert bucket.whole.dtype == (torch.bfloat16 if half else torch.float32)
            assert bucket.grads.dtype == torch.float32

    def test_frozen_ones_take_no_memory(self):
        found = parameters((40,), (50,), (60,))
        found["p1"].requires_grad_(False)
        before = found["p1"].data_ptr()
        buckets = held(found, bucket_size=10**6).buckets
        assert [list(bucket.parameters) for bucket in buckets] == [["p2", "p0"]] and buckets[0].size == 128
        assert found["p1"].data_ptr() == before and found["p1"].slot is None

    def test_several_buckets_by_default(self):
        found = parameters(*[(100, 64)] * 20)
        buckets = held(found, bucket_size=None).buckets
        assert len(buckets) == 7 and [len(bucket.parameters) for bucket in buckets] == [3] * 6 + [2]


def bucket_of(found, rank, shards):
    (layout,) = plan_buckets({name: p.numel() for name, p in found.items()}, 10**6, shards)
    blocks = []

    def take(size):
        blocks.append(torch.full((layout.size + 64,), float("nan")))
        return blocks[-1]

    view = silent_groups(shards, rank, instances=1).view(None)
    return Bucket(0, found, layout, view=view, take=take), blocks


class TestSlices:
    def test_kept_gradients(self):
        for rank in range(3):
            found = parameters((70,), (150,))
            bucket, blocks = bucket_of(found, rank, 3)
            bucket.keep_grads(True)
            assert bucket.size == 384 and len(bucket.param_shard) == len(bucket.grad_shard) == 128
            bucket.whole.copy_(torch.arange(384))
            bucket.grads.copy_(torch.arange(384))
            assert (
                bucket.param_shard.tolist() == bucket.grad_shard.tolist() == list(range(128 * rank, 128 * rank + 128))
            )
            assert blocks == []

    def test_gradients_that_are_not_kept(self):
        """Taken when first written, given up to be reduced, added to the shard; padding in borrowed memory is zero."""
        found = parameters((70,), (150,))
        bucket, blocks = bucket_of(found, 1, 3)
        bucket.keep_grads(False)
        assert bucket.grads is None and len(bucket.grad_shard) == 128 and blocks == []
        for _ in range(2):
            bucket.clear()
            for microbatch in (1.0, 10.0):
                found["p1"].slot.add(torch.full((150,), microbatch))
                found["p0"].slot.add(torch.full((70,), 7.0))
                assert bucket.grads[~used(bucket)].eq(0).all(), "padding"
                block = bucket.detach()
                assert bucket.grads is None and block is blocks[-1] and all(p.slot.fresh for p in found.values())
                bucket.accumulate(block)
            assert bucket.grad_shard.eq(11.0).all(), "p1 from its start on"
        assert len(blocks) == 4, "a block a backward pass"

    def test_change_of_mind(self):
        found = parameters((70,), (150,))
        bucket, blocks = bucket_of(found, 0, 2)
        for keep in (True, False, True):
            bucket.keep_grads(keep)
            bucket.clear()
            found["p0"].slot.add(torch.ones(70))
            found["p1"].slot.add(torch.ones(150))
            assert bucket.view_of(bucket.grads, "p0").eq(1).all() and bucket.view_of(bucket.grads, "p1").eq(1).all()
            assert bucket.grads[~used(bucket)].eq(0).all()
            if not keep:
                bucket.accumulate(bucket.detach())
            assert bucket.grad_shard.eq(used(bucket)[: len(bucket.grad_shard)]).all()
        assert len(blocks) == 1

    def test_missing_gradients_become_zero_and_are_named(self):
        found = parameters((70,), (150,))
        bucket, _ = bucket_of(found, 0, 1)
        bucket.keep_grads(True)
        bucket.grads.fill_(float("nan"))
        bucket.clear()
        found["p1"].slot.add(torch.ones(150))
        assert bucket.fill_missing() == ["p0"]
        assert bucket.view_of(bucket.grads, "p0").eq(0).all() and bucket.view_of(bucket.grads, "p1").eq(1).all()

    def test_runs(self):
        """Neighbours with the same key are one run, of whole rows."""
        found = parameters((70,), (10,), (150,), (64,))
        key = {id(p.info): name in ("p0", "p1") for name, p in found.items()}
        whole, _ = bucket_of(found, 0, 1)
        assert whole.size == 448 and whole.runs(lambda info, section: key[id(info)]) == [
            (0, 192, True),
            (192, 448, False),
        ]
        assert whole.runs(lambda info, section: None) == [(0, 448, None)]
        found = parameters((70,), (10,), (150,), (64,))
        key = {id(p.info): name in ("p0", "p1") for name, p in found.items()}
        second, _ = bucket_of(found, 1, 4)
        assert second.size == 512 and second.runs(lambda info, section: key[id(info)]) == [
            (0, 64, True),
            (64, 128, False),
        ]
        last, _ = bucket_of(parameters((3,)), 3, 4)
        assert last.runs(lambda info, section: True) == [] and last.pieces == [], "a slice of padding alone"


@pytest.mark.parametrize("fields", [LLAMA, GPT], ids=["llama", "gpt"])
class TestGradients:
    @each_mode
    def test_equal_to_autograds_own(self, fields, mode):
        """The same model without buckets."""
        ids = make_ids(3, 12)
        plain = make_model(fields, pool.groups(), spread=0.1)
        losses(plain, ids).sum().backward()
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        model = make_model(fields, pool.groups(), spread=0.1)
        data_parallel = make_data_parallel(model, pool.groups(), **mode)
        assert len(data_parallel.buckets) > 3
        accumulate(model, data_parallel, [ids])
        assert_gradients(found_in(data_parallel), expected, limit=1e-6)
        assert all(parameter.grad is None for parameter in model.parameters()), "no gradient lives twice"
        assert data_parallel.without_gradient() == []

    @each_mode
    def test_microbatches_add_up(self, fields, mode):
        model = make_model(fields, pool.groups(), spread=0.1)
        data_parallel = make_data_parallel(model, pool.groups(), **mode)
        ids = make_ids(6, 12)
        accumulate(model, data_parallel, [ids])
        whole = found_in(data_parallel)
        for sizes in ([1] * 6, [2, 3, 1]):
            accumulate(model, data_parallel, ids.split(sizes))
            assert_gradients(found_in(data_parallel), whole)

    @each_mode
    def test_a_new_step_forgets_the_old_one(self, fields, mode):
        """Even NaN: the first writer overwrites."""
        model = make_model(fields, pool.groups())
        data_parallel = make_data_parallel(model, pool.groups(), **mode)
        accumulate(model, data_parallel, [make_ids(2, 12)])
        first = found_in(data_parallel)
        for bucket in data_parallel.buckets:
            bucket.grad_shard[used(bucket)] = float("nan")
        accumulate(model, data_parallel, [make_ids(2, 12)])
        for name, gradient in found_in(data_parallel).items():
            assert gradient.equal(first[name]), name

    @each_mode
    def test_padding_stays_zero(self, fields, mode):
        """Also where memory of one bucket is used for another after it."""
        model = make_model(fields, pool.groups())
        data_parallel = make_data_parallel(model, pool.groups(), **mode)
        padding = 0
        for _ in range(2):
            accumulate(model, data_parallel, make_ids(4, 12).split(2))
            for bucket in data_parallel.buckets:
                assert bucket.grad_shard[~used(bucket)].eq(0).all()
                padding += int((~used(bucket)).sum())
        assert padding > 0


@each_mode
def test_a_tied_weight_has_one_place_and_the_sum_of_its_gradients(mode):
    tied = make_model(GPT, pool.groups())
    untied = make_model({**GPT, "untie_embeddings_and_output_weights": True}, pool.groups())
    with torch.no_grad():
        untied.output_layer.weight.copy_(untied.embedding.word_embeddings.weight)
    found = []
    for model in (tied, untied):
        data_parallel = make_data_parallel(model, pool.groups(), **mode)
        accumulate(model, data_parallel, make_ids(4, 12).split(2))
        found.append(found_in(data_parallel))
    word, head = "embedding.word_embeddings.weight", "output_layer.weight"
    assert head not in found[0] and head in found[1]
    expected = {**found[1], word: found[1][word] + found[1][head]}
    del expected[head]
    assert_gradients(found[0], expected)


@each_mode
def test_a_parameter_without_gradient_counts_zero(mode):
    found = parameters((4, 4), (4,))
    data_parallel = held(found, bucket_size=1, **mode)
    for bucket in data_parallel.buckets:
        bucket.grad_shard.fill_(float("nan"))
    step(data_parallel, found["p0"] * 2.0)
    gradients = found_in(data_parallel)
    assert gradients["p0"].eq(2).all() and gradients["p1"].eq(0).all()
    assert data_parallel.without_gradient() == ["p1"]
    step(data_parallel, torch.cat([(found["p0"] * 2.0).flatten(), found["p1"]]))
    assert data_parallel.without_gradient() == [] and found_in(data_parallel)["p1"].eq(1).all()


@each_mode
def test_autograds_gradients_move_into_the_slot(mode):
    """What no layer writes itself: norm weights and biases."""
    found = parameters((3,), dtype=torch.bfloat16)
    data_parallel = held(found, bucket_size=1, **mode)
    parameter = found["p0"]
    assert isinstance(parameter, Parameter)
    step(data_parallel, parameter * 1.0, parameter * 2.0, parameter * 4.0)
    gradient = found_in(data_parallel)["p0"]
    assert parameter.grad is None and gradient.eq(7).all() and gradient.dtype == torch.float32
    step(data_parallel, parameter * 3.0)
    assert found_in(data_parallel)["p0"].eq(3).all()


def step(data_parallel, *microbatches):
    data_parallel.begin_step(len(microbatches))
    for number, output in enumerate(microbatches, start=1):
        differentiate(data_parallel, output.sum(), last=number == len(microbatches))
    data_parallel.finish_reduction()


def found_in(data_parallel):
    """Name -> reduced gradient."""
    return assemble([pieces(data_parallel)])
