"""Buckets for any dp, and gradients that land in the buffer, with one process."""

import math

import pytest
import torch
from torch import nn

from megatron.core.distributed.grad_buffer import GradBuffer, build_buffers, plan_buckets
from megatron.core.parameter import Init, Parameter, make_parameter
from tests import pool
from tests.unit.models.builds import (
    CPU,
    GPT,
    LLAMA,
    assert_gradients,
    gradients,
    losses,
    make_buffers,
    make_ids,
    make_model,
)

NUMELS = {"a": 1, "b": 63, "c": 64, "d": 65, "e": 1000, "f": 7, "g": 128, "h": 4097, "i": 2}


def parameters(*shapes, dtype=torch.float32):
    tp = pool.groups().tp
    init = Init("normal", 1.0)
    made = {f"p{n}": make_parameter(s, init, dtype=dtype, device=CPU, tp=tp) for n, s in enumerate(shapes)}
    for number, parameter in enumerate(made.values()):
        nn.init.constant_(parameter, number + 1.0)
    return made


class TestPlan:
    @pytest.mark.parametrize("dp", range(1, 9))
    @pytest.mark.parametrize("bucket_size", [1, 100, 1000, 10**9])
    def test_properties(self, dp, bucket_size):
        buckets, offsets = plan_buckets(NUMELS, bucket_size, dp)
        assert [name for bucket in buckets for name in bucket.names] == list(NUMELS), "each once, in order"
        assert list(offsets) == list(NUMELS)
        end = 0
        for bucket in buckets:
            assert bucket.start == end and bucket.names
            end = bucket.end
            assert (bucket.end - bucket.start) % math.lcm(dp, 128) == 0
            used = bucket.start
            for name in bucket.names:
                assert offsets[name] % 64 == 0 and used <= offsets[name] < used + 64
                used = offsets[name] + NUMELS[name]
            assert bucket.end - math.lcm(dp, 128) < used <= bucket.end, "padded by less than one step"
        for bucket in buckets[:-1]:
            before_last = offsets[bucket.names[-1]]
            assert before_last - bucket.start < bucket_size, "closed as soon as it is large enough"
            assert offsets[bucket.names[-1]] + NUMELS[bucket.names[-1]] - bucket.start >= bucket_size

    def test_sizes(self):
        assert len(plan_buckets(NUMELS, 1, 4)[0]) == len(NUMELS)
        assert len(plan_buckets(NUMELS, 10**9, 4)[0]) == 1

    def test_by_hand(self):
        buckets, offsets = plan_buckets({"a": 100, "b": 30, "c": 10}, 120, 3)
        assert offsets == {"a": 0, "b": 128, "c": 384}
        assert [(b.start, b.end, b.names) for b in buckets] == [(0, 384, ("a", "b")), (384, 768, ("c",))]


class TestBuffer:
    def test_parameters_move_in_with_their_values(self):
        found = parameters((3, 5), (70,), (2, 2, 2))
        (buffer,) = build_buffers(found, dp=pool.groups().dp_cp, tp=pool.groups().tp, bucket_size=50)
        assert list(buffer.parameters) == ["p2", "p1", "p0"], "the reverse of registration"
        used = torch.zeros(buffer.params.numel(), dtype=torch.bool)
        for number, (name, parameter) in enumerate(found.items()):
            assert parameter.eq(number + 1.0).all()
            assert buffer.slice_of(buffer.params, name).data_ptr() == parameter.data_ptr()
            assert parameter.data_ptr() % 64 == 0
            slot = parameter.slot
            assert slot.fresh and slot.main_grad.shape == parameter.shape and slot.main_grad.dtype == torch.float32
            assert buffer.slice_of(buffer.grads, name).data_ptr() == slot.main_grad.data_ptr()
            buffer.slice_of(used, name).fill_(True)
        assert used.sum() == 15 + 70 + 8
        assert buffer.params[~used].eq(0).all() and buffer.grads[~used].eq(0).all()

    def test_a_buffer_a_dtype(self):
        found = {**parameters((4,), (5,)), "half": parameters((6,), dtype=torch.bfloat16)["p0"]}
        full, half = build_buffers(found, dp=pool.groups().dp_cp, tp=pool.groups().tp, bucket_size=None)
        assert list(full.parameters) == ["p1", "p0"] and list(half.parameters) == ["half"]
        assert half.params.dtype == torch.bfloat16 and half.grads.dtype == torch.float32

    def test_default_bucket_size(self):
        """40M elements are one bucket's worth: a small model has one."""
        (buffer,) = build_buffers(parameters((100,)), dp=pool.groups().dp_cp, tp=pool.groups().tp, bucket_size=None)
        assert len(buffer.buckets) == 1


def accumulate(model, buffers, batches):
    for buffer in buffers:
        buffer.clear()
    for ids in batches:
        losses(model, ids).sum().backward()
    for buffer in buffers:
        buffer.reduce()


@pytest.mark.parametrize("fields", [LLAMA, GPT], ids=["llama", "gpt"])
class TestGradients:
    def test_equal_to_autograds_own(self, fields):
        """The same model without a buffer."""
        ids = make_ids(3, 12)
        plain = make_model(fields, pool.groups(), spread=0.1)
        losses(plain, ids).sum().backward()
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        model = make_model(fields, pool.groups(), spread=0.1)
        buffers = make_buffers(model, pool.groups())
        assert len(buffers[0].buckets) > 3
        accumulate(model, buffers, [ids])
        assert_gradients(gradients(buffers), expected, limit=1e-6)
        assert all(parameter.grad is None for parameter in model.parameters()), "no gradient lives twice"

    def test_microbatches_add_up(self, fields):
        model = make_model(fields, pool.groups(), spread=0.1)
        buffers = make_buffers(model, pool.groups())
        ids = make_ids(6, 12)
        accumulate(model, buffers, [ids])
        whole = gradients(buffers)
        for sizes in ([1] * 6, [2, 3, 1]):
            accumulate(model, buffers, ids.split(sizes))
            assert_gradients(gradients(buffers), whole)

    def test_a_new_step_forgets_the_old_one(self, fields):
        """Even NaN: the first writer overwrites."""
        model = make_model(fields, pool.groups())
        buffers = make_buffers(model, pool.groups())
        accumulate(model, buffers, [make_ids(2, 12)])
        first = gradients(buffers)
        for buffer in buffers:
            for name in buffer.parameters:
                buffer.slice_of(buffer.grads, name).fill_(float("nan"))
        accumulate(model, buffers, [make_ids(2, 12)])
        for name, gradient in gradients(buffers).items():
            assert gradient.equal(first[name]), name

    def test_padding_stays_zero(self, fields):
        model = make_model(fields, pool.groups())
        (buffer,) = make_buffers(model, pool.groups())
        accumulate(model, [buffer], [make_ids(2, 12)])
        used = torch.zeros(buffer.grads.numel(), dtype=torch.bool)
        for name in buffer.parameters:
            buffer.slice_of(used, name).fill_(True)
        assert 0 < (~used).sum() < used.numel() / 2
        assert buffer.grads[~used].eq(0).all()


def test_a_tied_weight_has_one_place_and_the_sum_of_its_gradients():
    tied = make_model(GPT, pool.groups())
    untied = make_model({**GPT, "untie_embeddings_and_output_weights": True}, pool.groups())
    with torch.no_grad():
        untied.output_layer.weight.copy_(untied.embedding.word_embeddings.weight)
    found = []
    for model in (tied, untied):
        buffers = make_buffers(model, pool.groups())
        accumulate(model, buffers, make_ids(4, 12).split(2))
        found.append(gradients(buffers))
    word, head = "embedding.word_embeddings.weight", "output_layer.weight"
    assert head not in found[0] and head in found[1]
    expected = {**found[1], word: found[1][word] + found[1][head]}
    del expected[head]
    assert_gradients(found[0], expected)


def test_a_parameter_without_gradient_counts_zero():
    found = parameters((4, 4), (4,))
    used, unused = found["p0"], found["p1"]
    buffer = GradBuffer(found, dp=pool.groups().dp_cp, tp=pool.groups().tp, bucket_size=1)
    buffer.grads.fill_(float("nan"))
    buffer.clear()
    (used * 2.0).sum().backward()
    buffer.reduce()
    assert used.slot.main_grad.eq(2).all() and unused.slot.main_grad.eq(0).all()


def test_autograds_gradients_move_into_the_slot():
    """What no layer writes itself: norm weights and biases."""
    found = parameters((3,), dtype=torch.bfloat16)
    buffer = GradBuffer(found, dp=pool.groups().dp_cp, tp=pool.groups().tp, bucket_size=1)
    parameter = found["p0"]
    assert isinstance(parameter, Parameter)
    for scale in (1.0, 2.0, 4.0):
        (parameter * scale).sum().backward()
        assert parameter.grad is None
    assert parameter.slot.main_grad.eq(7).all() and parameter.slot.main_grad.dtype == torch.float32
    buffer.clear()
    (parameter * 3.0).sum().backward()
    assert parameter.slot.main_grad.eq(3).all()
