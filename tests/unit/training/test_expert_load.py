"""Biases follow the integer load of the batches that were applied, and nothing else; the report says how even it
was."""

import pytest
import torch

from megatron.core.transformer.moe.router import Router
from megatron.kernels.ops import routing as kernels
from megatron.training.routing_trace import RoutingTrace
from megatron.training.setup import build
from tests import pool
from tests.unit.config.runs import SHORT_RUN, make_run
from tests.unit.models.builds import CPU

EXPERTS, TOPK, RATE = 6, 2, 0.01
FIELDS = {
    **SHORT_RUN,
    "num_layers": 2,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_experts": EXPERTS,
    "moe_router_topk": TOPK,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": RATE,
    "moe_aux_loss_coeff": (0.01,),
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def made(**fields):
    trainer = build(make_run(**{**FIELDS, **fields}), pool.groups(), CPU)
    trainer.step.features.experts.trace = RoutingTrace()
    return trainer, [module for module in trainer.model.modules() if isinstance(module, Router)]


def loads(trainer, step, layer):
    """Assignments of each expert, counted one by one."""
    counts = [0] * EXPERTS
    for (at, _, number), chosen in trainer.step.features.experts.trace.choices.items():
        if (at, number) == (step, layer):
            for expert in chosen.flatten().tolist():
                counts[expert] += 1
    return counts


@pytest.mark.parametrize("recompute", [{}, FULL], ids=["kept", "recomputed"])
def test_five_steps_by_hand(recompute):
    """Over two microbatches per step; a recomputed forward does not count again."""
    trainer, routers = made(**recompute)
    expected = torch.zeros(2, EXPERTS)
    for step in range(5):
        report = trainer.train_step().experts
        for layer, router in enumerate(routers):
            counts = loads(trainer, step, layer)
            assert sum(counts) == 4 * 16 * TOPK
            mean = sum(counts) / EXPERTS
            for expert, count in enumerate(counts):
                expected[layer, expert] += RATE if count < mean else -RATE if count > mean else 0.0
            assert router.expert_bias.equal(expected[layer])
            assert router.previous_load.tolist() == counts
            assert report.imbalance[layer] == pytest.approx(max(counts) / mean)
        assert report.worst[0] == max(report.imbalance) and report.losses.keys() == {"aux_loss"}
    assert expected.any()


def test_what_leaves_the_biases_alone():
    """A step that was not applied, an evaluation, and a frozen router."""
    trainer, routers = made()
    trainer.train_step()
    before = [router.expert_bias.clone() for router in routers]
    load = [router.previous_load.clone() for router in routers]

    def unchanged():
        return all(router.expert_bias.equal(bias) for router, bias in zip(routers, before, strict=True))

    trainer.evaluate(trainer.readers.valid)
    assert unchanged()
    batches = trainer.readers.train.read(2)
    trainer.step.forward_backward(batches)
    trainer.step.features.experts.update_biases(applied=torch.tensor(False))
    assert unchanged() and all(router.previous_load.equal(each) for router, each in zip(routers, load, strict=True))
    for router in routers:
        router.weight.requires_grad_(False)
    trainer.step.forward_backward(batches)
    trainer.step.features.experts.update_biases(applied=torch.tensor(True))
    assert unchanged()
    for router in routers:
        router.weight.requires_grad_(True)
    trainer.step.forward_backward(batches)
    trainer.step.features.experts.update_biases(applied=torch.tensor(True))
    assert not unchanged()


@pytest.mark.parametrize("recompute", [{}, FULL], ids=["kept", "recomputed"])
def test_an_evaluation_counts_no_load(monkeypatch, recompute):
    trainer, _ = made(**recompute)
    count, counted = kernels.counts_by_sample, []
    monkeypatch.setattr(kernels, "counts_by_sample", lambda *args: counted.append(args) or count(*args))
    trainer.evaluate(trainer.readers.valid)
    assert not counted
    trainer.train_step()
    assert len(counted) == 8  # of two microbatches and layers: the choice with its bias, and that of the balance loss


def test_biases_stay_in_fp32():
    """Of a bf16 model. A bf16 bias near 7 could not take a step of 0.001."""
    trainer, routers = made(bf16=True, moe_router_bias_update_rate=1e-3)
    for router in routers:
        router.expert_bias += 7.0
    trainer.train_step()
    for router in routers:
        assert router.expert_bias.dtype == torch.float32
        moved = (router.expert_bias.double() - 7.0).abs()
        assert ((moved - 1e-3).abs() < 1e-6).any() and (moved < 1.1e-3).all()


def test_what_a_capacity_keeps_is_followed():
    """By experts with other weights, which would keep other tokens; without it a run differs."""
    fields = {"moe_expert_capacity_factor": 0.5}
    first, _ = made(**fields)
    first.train_step()
    recorded = first.step.features.experts.trace
    kept = {key: margins > 0 for key, margins in recorded.capacity_margins.items()}
    assert len(kept) == 8 and all(0 < accepted.sum() < accepted.numel() for accepted in kept.values())

    def taken(capacity):
        trainer, routers = made(**fields)
        for router in routers:
            router.weight.data.neg_()
        trainer.step.features.experts.trace = trace = RoutingTrace(recorded.choices, forced_capacity=capacity)
        trainer.train_step()
        return [(trace.capacity_margins[key] > 0).equal(accepted) for key, accepted in kept.items()]

    assert all(taken(recorded.capacity_margins)) and not any(taken(None))


def test_forced_choices_are_followed():
    """All tokens to two experts; the others get no token in the whole run, and gradients of exactly zero."""
    first, _ = made()
    first.train_step()
    forced = {
        key: torch.tensor([1, 4]).expand_as(chosen) for key, chosen in first.step.features.experts.trace.choices.items()
    }
    trainer, _ = made(use_distributed_optimizer=True)
    trainer.step.features.experts.trace = RoutingTrace(forced)
    report = trainer.train_step()
    assert report.experts.imbalance == (3.0, 3.0) and report.grad_norm > 0
    weights = {name: piece for name, _, piece in trainer.data_parallel.gradients() if ".experts.linear_fc" in name}
    assert len(weights) == 4
    for gradient in weights.values():
        assert (gradient[[0, 2, 3, 5]] == 0).all() and gradient[1].any() and gradient[4].any()
