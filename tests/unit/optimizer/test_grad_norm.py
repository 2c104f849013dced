"""Norm and zeros of a model's gradients, and which rank counts what."""

import dataclasses

import pytest
import torch

from megatron.base.mesh import DENSE
from megatron.core.optimizer.grad_norm import global_norm, global_zeros
from megatron.core.parameter import make_parameter
from megatron.spec.parameter import Init, ParamSpec, Shard
from tests import pool
from tests.unit.models.builds import CPU
from tests.unit.silent_groups import silent_groups


def dense(*tensors):
    """As parts of dense parameters."""
    return [(DENSE, tensor) for tensor in tensors]


@pytest.mark.parametrize("rank", range(4))
def test_who_counts(rank):
    groups = silent_groups(4, rank, tp=4)
    made = {
        name: make_parameter(
            ParamSpec((size, 4), Init("constant", 0.0), **sharded), groups, dtype=torch.float32, device=CPU
        ).info
        for name, size, sharded in (
            ("sharded", 4, {"shards": (Shard("tp", 1),)}),
            ("replicated", 4, {}),
            ("shared", 2, {"shards": (Shard("tp", 0),), "own_rows": 2}),
        )
    }
    counts = {name: [info.held_first(section, groups) for section in info.sections] for name, info in made.items()}
    assert counts == {"sharded": [True], "replicated": [rank == 0], "shared": [True, rank % 2 == 0]}
    at_the_other_end = dataclasses.replace(groups, pp=silent_groups(2, 1, pp=2).pp)
    tied = dataclasses.replace(made["sharded"], on_both_ends=True)
    assert tied.held_first(tied.sections[0], groups) and not tied.held_first(tied.sections[0], at_the_other_end)


def test_a_row_that_is_cut_between_two_sections_counts_as_one_with_zeros():
    """So the norm of what a rank counts of such a parameter depends on no slices, either."""
    gradient = torch.randn(200)
    padded = torch.cat((gradient, torch.zeros(56)))
    whole = global_norm(dense(padded), pool.groups(), CPU)
    assert global_norm(dense(gradient), pool.groups(), CPU) == whole
    assert global_norm(dense(gradient[:64], gradient[64:]), pool.groups(), CPU) == whole


def test_norm():
    tensors = [torch.tensor([3.0, 0.0]), torch.tensor([4.0]), torch.zeros(3)]
    assert global_norm(dense(*tensors), pool.groups(), CPU) == 5.0
    assert global_norm(iter(dense(*tensors)), pool.groups(), CPU) == 5.0
    assert global_zeros(dense(*tensors), pool.groups(), CPU) == 4


def test_nothing_to_count():
    assert global_norm(dense(), pool.groups(), CPU) == 0.0
    assert global_zeros(dense(), pool.groups(), CPU) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows(bad):
    norm = global_norm(dense(torch.ones(5), torch.tensor([1.0, bad])), pool.groups(), CPU)
    assert not torch.isfinite(norm)


def test_large_gradients_do_not_overflow():
    """fp16's scaled gradients: the sum of squares over tensors is taken in fp64."""
    tensors = [torch.full((4,), 1e18) for _ in range(4)]
    assert global_norm(dense(*tensors), pool.groups(), CPU) == pytest.approx(4e18, rel=1e-6)


def test_the_cut_does_not_show():
    """One long bucket, many short ones, or slices of several ranks: the norm is the same to the last bit."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        gradient = torch.randn(64 * 3000, generator=generator) * torch.rand(64 * 3000, generator=generator) ** 4
        whole = global_norm(dense(gradient), pool.groups(), CPU)
        for rows in (1, 7, 100, 2999):
            assert global_norm(dense(*gradient.split(64 * rows)), pool.groups(), CPU) == whole


def many_zeros(rank, size, instances):
    """More zeros in every slice than fp32 has whole numbers."""
    return global_zeros(dense(torch.zeros(1).expand(2**24 + 1)), pool.groups(instances=instances), CPU)


@pytest.mark.parametrize(("size", "instances"), [(2, 1), (4, 2)])
def test_every_zero_is_counted(size, instances):
    assert pool.run(size, many_zeros, instances) == [2 * (2**24 + 1)] * size
