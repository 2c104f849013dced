"""The router's gradients hold the balance losses as they are written down; its choices and biases follow the rules."""

import dataclasses

import pytest
import torch

from megatron.config.moe_training import MoEConfig
from megatron.core.transformer.moe.balance import BalanceLosses, TokenCounts
from megatron.core.transformer.moe.microbatch import MicrobatchRouting
from megatron.core.transformer.moe.router import Router
from megatron.kernels.ops import routing as kernels
from megatron.spec.moe import RouterSpec
from megatron.spec.parameter import Init
from tests import pool
from tests.unit.models.builds import make_build

S, B, H, E, K = 6, 3, 8, 5, 2
SAMPLES, TOTAL = 7, 90  # of the global batch
KINDS = {
    "aux_loss": (("aux_loss", 0.3),),
    "seq_aux_loss": (("seq_aux_loss", 0.3),),
    "global_aux_loss": (("global_aux_loss", 0.3),),
    "all": (("aux_loss", 0.1), ("seq_aux_loss", 0.2), ("global_aux_loss", 0.3)),
    "none": (),
}


def router(score_function="softmax", **fields):
    spec = RouterSpec(H, E, K, score_function, normalized=True, dtype="fp64", init=Init("normal", 1.0), **fields)
    made = Router(make_build({"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4}, pool.groups()), spec, 0)
    torch.manual_seed(0)
    torch.nn.init.normal_(made.weight)
    made.previous_load.copy_(torch.tensor([3, 0, 5, 1, 1]))
    return made


def routed_tokens(padded):
    """[s, b] without the last tokens of the last sample."""
    routed = torch.ones(S, B, dtype=torch.bool)
    routed[-2:, -1] = False
    return routed if padded else None


def routing(losses, padded, scale=1.0):
    routed = routed_tokens(padded)
    by_sample = torch.full((B,), S) if routed is None else routed.sum(0)
    tokens = TokenCounts(by_sample, torch.tensor(TOTAL), SAMPLES)
    return MicrobatchRouting(torch.arange(S), S, routed, tokens, losses, scale)


def written_out(logits, chosen, routed, losses, score_function, previous):
    """The sum of the losses, sample by sample and expert by expert. logits [s, b, E], chosen [s, b, k]."""
    scores = logits.softmax(-1) if score_function == "softmax" else logits.sigmoid()
    p = scores / scores.sum(-1, keepdim=True)
    total = logits.new_zeros(())
    for kind, coefficient in losses.kinds:
        for sample in range(B):
            inside = [place for place in range(S) if routed[place, sample]]
            counted = range(B) if kind == "aux_loss" else [sample]
            taken = [
                int(e) for other in counted for place in range(S) if routed[place, other] for e in chosen[place, other]
            ]
            counts = torch.tensor([taken.count(expert) for expert in range(E)], dtype=torch.float64)
            weight = 1 / (SAMPLES * len(inside))
            if kind == "aux_loss":
                weight = B / SAMPLES / int(routed.sum())
            if kind == "global_aux_loss":
                counts, weight = previous.double(), 1 / TOTAL
            f = counts / counts.sum()
            for place in inside:
                for expert in range(E):
                    total = total + coefficient * weight * E * f[expert] * p[place, sample, expert]
    return total + losses.z * (logits.logsumexp(-1).square() * routed).sum() / TOTAL


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize(("padded", "z"), [(False, 0.0), (True, 0.5)])
def test_the_gradients_of_the_losses(score_function, kinds, padded, z):
    losses = BalanceLosses(KINDS[kinds], z)
    made, x = router(score_function), torch.randn(S, B, H, dtype=torch.float64).float().requires_grad_()
    found = routing(losses, padded, scale=8.0)
    _, weights = made(x.flatten(0, 1), B, found)
    upstream = torch.randn_like(weights)
    (weights * upstream).sum().backward()

    y = x.detach().requires_grad_()
    logits = y.double() @ made.weight.detach().double().t()
    chosen = found.layers[0].chosen.view(S, B, K)
    scores = logits.softmax(-1) if score_function == "softmax" else logits.sigmoid()
    picked = scores.gather(-1, chosen)
    picked = picked / picked.sum(-1, keepdim=True)
    routed = routed_tokens(padded)
    routed = torch.ones(S, B, dtype=torch.bool) if routed is None else routed
    objective = (picked * routed.unsqueeze(-1) * upstream.view(S, B, K)).sum()
    objective = objective + 8.0 * written_out(logits, chosen, routed, losses, score_function, made.previous_load)
    objective.backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kinds", KINDS)
def test_the_values_of_the_losses(kinds):
    losses = BalanceLosses(KINDS[kinds], 0.5)
    made, x = router(), torch.randn(S, B, H)
    found = routing(losses, True)
    made(x.flatten(0, 1), B, found)
    logits = x.double() @ made.weight.detach().double().t()
    chosen, values = found.layers[0].chosen.view(S, B, K), found.values(0, made.previous_load)
    for value, name in zip(values.tolist(), losses.names, strict=True):
        alone = BalanceLosses(((name, 1.0),), 0.0) if name != "z_loss" else BalanceLosses((), 1.0)
        expected = written_out(logits, chosen, routed_tokens(True), alone, "softmax", made.previous_load)
        assert value == pytest.approx(float(expected), rel=1e-6)


def test_a_balance_loss_of_equal_load_is_one():
    losses = BalanceLosses.of(MoEConfig(moe_router_load_balancing_type=("seq_aux_loss",), moe_aux_loss_coeff=(0.1,)))
    made = router()
    made.weight.data.zero_()
    found = routing(losses, False)
    found.tokens = dataclasses.replace(found.tokens, samples=B)
    found.forced[0] = torch.tensor([[t % E, (t + 1) % E] for t in range(E)]).repeat(S * B, 1)[: S * B]
    made(torch.randn(S * B, H), B, found)
    assert found.values(0, made.previous_load).item() == pytest.approx(1.0)


def test_a_second_run_takes_the_choices_of_the_first_and_counts_nothing():
    losses, made, x = BalanceLosses(KINDS["aux_loss"], 0.0), router(), torch.randn(S * B, H)
    found = routing(losses, False)
    first, _ = made(x, B, found)
    layer = found.layers[0]
    again, _ = made(-x, B, found)  # other logits, as another kernel's rounding would give
    assert again.equal(first) and found.layers[0] is layer
    assert not made(-x, B, routing(losses, False))[0].equal(first)


def test_evaluation_chooses_alike_and_keeps_nothing(monkeypatch):
    made, x, found = router(), torch.randn(S * B, H), routing(None, True)
    first = made(x, B, routing(BalanceLosses((), 0.0), True))
    monkeypatch.delattr(kernels, "counts_by_sample")
    for mine, other in zip(made(x, B, found), first, strict=True):
        assert mine.equal(other)
    assert found.layers == {}


def test_padding_is_not_routed_and_not_counted():
    made, found = router(), routing(BalanceLosses((), 0.0), True)
    indices, weights = made(torch.randn(S * B, H), B, found)
    outside = ~routed_tokens(True).flatten()
    assert (indices[outside] == -1).all() and (weights[outside] == 0).all() and (indices[~outside] >= 0).all()
    assert found.layers[0].counts.sum(1).tolist() == [S * K, S * K, (S - 2) * K]


def test_balance_losses_count_the_highest_scores_and_the_bias_follows_the_choice():
    """As Megatron-LM: the load of a biased choice is another one than that of its losses."""
    made, found = router("sigmoid", has_bias=True), routing(BalanceLosses(KINDS["aux_loss"], 0.0), False)
    made.expert_bias.copy_(torch.linspace(-1.0, 1.0, E))
    x = torch.randn(S * B, H)
    indices, _ = made(x, B, found)
    highest = (x @ made.weight.detach().t()).topk(K, dim=1).indices
    layer = found.layers[0]
    assert layer.counts.sum(0).tolist() == highest.flatten().bincount(minlength=E).tolist()
    assert layer.load.tolist() == indices.flatten().bincount(minlength=E).tolist() != layer.counts.sum(0).tolist()


def test_what_a_capacity_drops_is_no_load_of_a_bias():
    made, found = router("sigmoid", has_bias=True), routing(BalanceLosses(KINDS["aux_loss"], 0.0), False)
    made._moe = dataclasses.replace(made._moe, moe_expert_capacity_factor=0.5)
    indices, _ = made(torch.randn(S * B, H), B, found)
    kept = indices[indices >= 0]
    assert 0 < len(kept) < indices.numel()
    assert found.layers[0].load.tolist() == kept.bincount(minlength=E).tolist()
