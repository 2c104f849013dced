"""AdamW and SGD over buckets against torch's own optimizers on the same model."""

import math

import pytest
import torch

from megatron.core.parameter import local_parameters
from tests import pool
from tests.unit.models.builds import (
    GPT,
    LLAMA,
    backward,
    gradients,
    losses,
    make_data_parallel,
    make_ids,
    make_model,
    make_optimizer,
)

LR, DECAY = 1e-2, 0.1


def setting(fields=GPT, *, fp16=False, **optimizer):
    model = make_model(fields, pool.groups(), spread=0.1)
    data_parallel = make_data_parallel(model, pool.groups())
    return model, data_parallel, make_optimizer(data_parallel, pool.groups(), fp16=fp16, **optimizer)


def gradient_of(model, data_parallel, step=0, scale=1.0):
    """Gradients of one batch, times `scale`, in the buckets."""
    backward(data_parallel, losses(model, make_ids(2, 10, seed=step)).mean() * scale)


def clear(data_parallel):
    for bucket in data_parallel.buckets:
        bucket.grads.zero_()


def state_of(optimizer):
    """Parameter -> key -> its elements; whole ones, for nothing is sharded here."""
    found = {}
    for piece, key, tensor in optimizer.pieces():
        assert piece.start == 0 and len(tensor) == piece.stop
        found.setdefault(piece.name, {})[key] = tensor
    return found


def torch_optimizer(model, kind):
    """torch's own, told by hand what decays, and which are the ends: its last group."""
    parameters = local_parameters(model).items()
    vectors = [p for name, p in parameters if "norm" in name or name.endswith("bias")]
    ends = [p for name, p in parameters if "word_embeddings" in name or "output_layer" in name]
    matrices = [p for _, p in parameters if not any(p is other for other in (*vectors, *ends))]
    groups = [
        {"params": matrices, "weight_decay": DECAY},
        {"params": vectors, "weight_decay": 0.0},
        {"params": ends, "weight_decay": DECAY},
    ]
    if kind == "adam":
        return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-7, foreach=False, fused=False)
    return torch.optim.SGD(groups, lr=LR, momentum=0.8, foreach=False, fused=False)


@pytest.mark.parametrize("fields", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("decoupled", [None, 4.0])
def test_against_torch(fields, kind, clip, decoupled):
    """Five steps on the gradients that the other model has. decoupled: the ends have so many times the rate."""
    options = {"adam_beta2": 0.95, "adam_eps": 1e-7, "sgd_momentum": 0.8}
    ours, _, optimizer = setting(fields, optimizer=kind, clip_grad=clip, **options)
    theirs = make_model(fields, pool.groups(), spread=0.1)
    start = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    other = torch_optimizer(theirs, kind)
    other.param_groups[-1]["lr"] *= decoupled or 1.0
    for step in range(5):
        other.zero_grad()
        losses(theirs, make_ids(2, 10, seed=step)).mean().backward()
        for name, parameter in local_parameters(theirs).items():
            local_parameters(ours)[name].slot.main_grad.copy_(parameter.grad)
        norm = float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip or math.inf))
        other.step()
        update = optimizer.step(LR, DECAY, decoupled_lr=decoupled and decoupled * LR)
        assert update.applied and update.num_zeros is None
        assert update.grad_norm == pytest.approx(norm, rel=1e-6)
        assert not clip or update.grad_norm > clip, "clipping takes part"
    for name, parameter in theirs.named_parameters():
        moved = (parameter - start[name]).abs().max()
        difference = (ours.get_parameter(name) - parameter).abs().max()
        # torch's clip divides by norm + 1e-6, ours by norm.
        assert difference <= (5e-6 if clip else 1e-6) * moved + 1e-7, f"{name}: {difference / moved:.1e}"


def test_weight_decay_is_for_matrices():
    """Without gradients, decay alone moves parameters."""
    model, data_parallel, optimizer = setting()
    before = {name: p.detach().clone() for name, p in local_parameters(model).items()}
    clear(data_parallel)
    optimizer.step(LR, DECAY)
    for name, parameter in local_parameters(model).items():
        kept = "norm" in name or name.endswith("bias")
        factor = 1.0 if kept else 1.0 - LR * DECAY
        torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-6, atol=0, msg=name)
    assert any("norm" in name for name in before) and any(name.endswith("fc1.bias") for name in before)


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_change_nothing(fp16, bad):
    model, data_parallel, optimizer = setting(fp16=fp16, initial_loss_scale=4.0, hysteresis=1)
    gradient_of(model, data_parallel, scale=4.0)
    optimizer.step(LR, DECAY)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {name: {k: v.clone() for k, v in s.items()} for name, s in state_of(optimizer).items()}
    gradient_of(model, data_parallel, 1, scale=4.0)
    next(iter(data_parallel.buckets[0].parameters.values())).slot.main_grad.view(-1)[3] = bad
    update = optimizer.step(LR, DECAY, count_zeros=True)
    assert not update.applied and not update.grad_norm.isfinite()
    assert optimizer.steps == 1 and optimizer.loss_scale.value == (2.0 if fp16 else 1.0)
    for name, parameter in model.named_parameters():
        assert parameter.equal(before[name]), name
    for name, tensors in state.items():
        for key, tensor in tensors.items():
            assert state_of(optimizer)[name][key].equal(tensor), f"{name} {key}"


def test_without_the_check_they_are_applied():
    """--no-check-for-nan-in-loss-and-grad"""
    model, data_parallel, optimizer = setting(check_for_nan_in_loss_and_grad=False)
    gradient_of(model, data_parallel)
    local_parameters(model)["decoder.final_layernorm.weight"].slot.main_grad[0] = float("nan")
    assert optimizer.step(LR, DECAY).applied
    assert model.decoder.final_layernorm.weight[0].isnan()


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_the_loss_scale_is_divided_out(clip):
    """A fixed one, with the same result as without."""
    results, norms = [], []
    for scale in (None, 1024.0):
        model, data_parallel, optimizer = setting(fp16=scale is not None, loss_scale=scale, clip_grad=clip)
        for step in range(3):
            gradient_of(model, data_parallel, step, scale or 1.0)
            norms.append(float(optimizer.step(LR, DECAY).grad_norm))
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert norms[:3] == pytest.approx(norms[3:], rel=1e-5)
    torch.testing.assert_close(*results, rtol=0, atol=LR * 1e-3)


class TestMasters:
    def test_bf16_follows_fp32_masters(self):
        """The masters take updates that bf16 could not hold, and the model is always their rounding."""
        model, data_parallel, optimizer = setting({**GPT, "bf16": True})
        start = {name: s["master"].clone() for name, s in state_of(optimizer).items()}
        lr = 1e-6  # far below bf16's resolution
        for step in range(5):
            gradient_of(model, data_parallel, step)
            optimizer.step(lr, 0.0)
        moved = 0
        for name, parameter in local_parameters(model).items():
            master = state_of(optimizer)[name]["master"]
            assert master.dtype == torch.float32 and parameter.dtype == torch.bfloat16
            assert parameter.flatten().equal(master.bfloat16())
            assert (master - start[name]).abs().max() < 6e-6
            moved += int(master.ne(start[name]).sum())
        assert moved > 10_000

    def test_an_fp32_model_is_its_own_master(self):
        _, _, optimizer = setting()
        assert all("master" not in state for state in state_of(optimizer).values())
        assert set(next(iter(state_of(optimizer).values()))) == {"exp_avg", "exp_avg_sq"}
        optimizer.masters_from_parameters()
        assert all("master" not in state for state in state_of(optimizer).values())

    def test_state_of_sgd(self):
        _, _, optimizer = setting({**GPT, "bf16": True}, optimizer="sgd")
        assert set(next(iter(state_of(optimizer).values()))) == {"momentum_buffer", "master"}

    def test_masters_are_rebuilt_from_weights(self):
        model, _, optimizer = setting({**GPT, "bf16": True})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        optimizer.masters_from_parameters()
        assert all(state["master"].eq(0.5).all() for state in state_of(optimizer).values())


def test_state_is_the_optimizers_own():
    """Writing into it, as loading does, changes the next step."""
    model, data_parallel, optimizer = setting()
    for state in state_of(optimizer).values():
        state["exp_avg"].fill_(1.0)
        state["exp_avg_sq"].fill_(1.0)
    optimizer.steps = 10**6  # no bias correction any more
    clear(data_parallel)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step(LR, 0.0)
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old - LR * 0.9 / math.sqrt(0.999), rtol=1e-4, atol=1e-6)


def test_steps():
    model, data_parallel, optimizer = setting()
    assert optimizer.steps == 0
    gradient_of(model, data_parallel)
    optimizer.step(LR, DECAY)
    assert optimizer.steps == 1
    optimizer.steps = 41
    gradient_of(model, data_parallel, 1)
    optimizer.step(LR, DECAY)
    assert optimizer.steps == 42
    assert setting(optimizer="sgd")[2].steps == 0


@pytest.mark.parametrize("bf16", [False, True])
def test_params_norm(bf16):
    model, _, optimizer = setting({**GPT, "bf16": bf16})
    expected = math.sqrt(sum(float(p.detach().double().square().sum()) for p in model.parameters()))
    assert optimizer.params_norm() == pytest.approx(expected, rel=1e-6)


def test_zeros_in_the_gradient():
    model, data_parallel, optimizer = setting()
    gradient_of(model, data_parallel)
    expected = sum(int(gradient.eq(0).sum()) for gradient in gradients(data_parallel).values())
    assert expected > 0, "the vocabulary's padding has no gradient"
    assert optimizer.step(LR, DECAY, count_zeros=True).num_zeros == expected
