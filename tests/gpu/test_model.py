"""The decoder, its optimizer and its random state on CUDA against the CPU."""

import pytest
import torch

from megatron.core.comm.collectives import barrier
from megatron.core.device import choose_device, memory_report, peak_tflops, synchronize
from megatron.core.tensor_parallel.random import RngTracker
from megatron.training.batch import make_batch
from megatron.training.logging.timers import Timers
from megatron.training.step import TrainStep
from tests import pool
from tests.gpu.cuda import CPU, CUDA, NEEDS_CUDA
from tests.unit.models.builds import (
    GPT,
    LLAMA,
    assemble,
    assert_gradients,
    backward,
    gradients,
    losses,
    make_data_parallel,
    make_ids,
    make_model,
    make_optimizer,
    pieces,
    take_step,
)
from tests.unit.training.test_step import DATA, EOD

pytestmark = NEEDS_CUDA
MODELS = {"llama": LLAMA, "gpt": GPT}
# Heads of 64 channels, so that FlashAttention takes part in bf16.
LARGER = {"hidden_size": 256, "num_attention_heads": 4}


def loss_and_gradients(fields, device, groups, **options):
    """On weights that are made on the CPU: the inverse error function may differ in the last bit between devices."""
    weights = make_model(fields, groups, spread=0.1, **options).state_dict()
    model = make_model(fields, groups, device=device, **options)
    model.load_state_dict(weights)
    data_parallel = make_data_parallel(model, groups)
    loss = losses(model, make_ids(4, 32).to(device))
    backward(data_parallel, loss.mean())
    return loss.detach().cpu(), data_parallel


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
class TestAsOnTheCpu:
    def test_loss_and_gradients(self, fields):
        groups = pool.groups()
        expected, on_cpu = loss_and_gradients(fields, CPU, groups)
        found, on_gpu = loss_and_gradients(fields, CUDA, groups)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert_gradients({n: gradient.cpu() for n, gradient in gradients(on_gpu).items()}, gradients(on_cpu))

    def test_initial_values(self, fields):
        models = [make_model(fields, pool.groups(), device=device).state_dict() for device in (CPU, CUDA)]
        for name, tensor in models[0].items():
            torch.testing.assert_close(models[1][name].cpu(), tensor, rtol=1e-5, atol=1e-7, msg=name)

    @pytest.mark.parametrize("kind", ["adam", "sgd"])
    @pytest.mark.parametrize("fp16", [False, True])
    def test_optimizer(self, fields, kind, fp16):
        """Clipping and a loss scale, both through the divisor in the fused kernel; the same gradients on both."""
        results = []
        for device in (CPU, CUDA):
            model = make_model(fields, pool.groups(), device=CPU)
            weights = model.state_dict()
            model = make_model(fields, pool.groups(), device=device)
            model.load_state_dict(weights)
            data_parallel = make_data_parallel(model, pool.groups())
            options = {"optimizer": kind, "clip_grad": 0.5, "loss_scale": 64.0 if fp16 else None}
            optimizer = make_optimizer(data_parallel, pool.groups(), fp16=fp16, **options)
            norms = []
            for step in range(3):
                for number, parameter in enumerate(model.parameters()):
                    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + number))
                    parameter.slot.main_grad.copy_(noise)
                update = optimizer.step(1e-2, 0.1, count_zeros=True)
                assert update.applied
                norms.append(float(update.grad_norm))
            weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
            results.append((norms, float(optimizer.params_norm()), optimizer.steps, weights))
        (norms, total, steps, expected), (found_norms, found_total, found_steps, found) = results
        assert found_norms == pytest.approx(norms, rel=1e-5) and found_total == pytest.approx(total, rel=1e-5)
        assert found_steps == steps
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_an_overflow_changes_nothing():
    model = make_model(LLAMA, pool.groups(), device=CUDA)
    data_parallel = make_data_parallel(model, pool.groups())
    optimizer = make_optimizer(data_parallel, pool.groups(), fp16=True, hysteresis=1, initial_loss_scale=8.0)
    bucket = data_parallel.buckets[0]
    bucket.grads[5] = float("inf")
    before = bucket.whole.clone()
    update = optimizer.step(1e-2, 0.1)
    assert not update.applied and bucket.whole.equal(before) and optimizer.loss_scale.value == 4.0


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_training_in_half_precision(fields, precision, dropout):
    """Twenty steps on one batch: the loss falls to half, and the first agrees with fp32 on the CPU."""
    groups = pool.groups()
    fields = {**fields, **LARGER, precision: True, "init_method_std": 0.02, "hidden_dropout": dropout}
    model = make_model(fields, groups, device=CUDA)
    data_parallel = make_data_parallel(model, groups)
    optimizer = make_optimizer(data_parallel, groups, fp16=precision == "fp16", initial_loss_scale=2.0**10)
    step = TrainStep(model, data_parallel, optimizer, groups, Timers(0, lambda: synchronize(CUDA)), per_token=False)
    batches = [make_batch(make_ids(4, 64, seed=n).to(CUDA), EOD, DATA) for n in range(2)]
    found = [take_step(step, batches, 2e-3, 0.01) for _ in range(20)]
    assert all(update.applied for _, update in found)
    assert found[-1][0] < 0.5 * found[0][0]
    assert model.embedding.word_embeddings.weight.isfinite().all()
    if dropout == 0.0:
        plain = make_model({**fields, precision: False}, groups)
        exact = torch.cat([losses(plain, make_ids(4, 64, seed=n)) for n in range(2)]).mean()
        assert found[0][0] == pytest.approx(float(exact), rel=0.02)


def test_embedding_backward_is_deterministic():
    """Many tokens of few ids: what atomics would add in any order."""
    fields = {**LLAMA, "bf16": True, "hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 1024}
    model = make_model(fields, pool.groups(), device=CUDA)
    data_parallel = make_data_parallel(model, pool.groups())
    ids = make_ids(8, 1024, vocab=5).to(CUDA)[:, :-1]
    upstream = torch.randn(1024, 8, 512, device=CUDA, dtype=torch.bfloat16)
    seen = []
    for _ in range(4):
        data_parallel.begin_step(1)
        model.embedding(ids, torch.arange(1024, device=CUDA).unsqueeze(0)).backward(upstream)
        seen.append(model.embedding.word_embeddings.weight.slot.main_grad.clone())
    assert all(gradient.equal(seen[0]) for gradient in seen[1:])
    exact = torch.zeros(112, 512, dtype=torch.float64, device=CUDA)
    exact.index_add_(0, ids.t().flatten(), upstream.double().flatten(0, 1))
    assert (seen[0] - exact).abs().max() < 0.01 * exact.abs().max()


def test_random_streams():
    """On the device's generator, leaving its default stream as it was; saved as bytes on the CPU."""
    tracker = RngTracker(7, pool.groups(), CUDA)
    torch.cuda.manual_seed(3)
    expected = torch.rand(4, device=CUDA)
    torch.cuda.manual_seed(3)
    with tracker.stream("replicated"):
        first = torch.rand(4, device=CUDA)
    with tracker.stream("sharded"):
        other = torch.rand(4, device=CUDA)
    assert torch.rand(4, device=CUDA).equal(expected)
    assert not first.eq(other).any() and not first.eq(expected).any()
    saved = tracker.state()
    assert all(state.device == CPU and state.dtype == torch.uint8 for state in saved.values())
    draws = []
    for _ in range(2):
        with tracker.stream("replicated"):
            draws.append(torch.rand(4, device=CUDA))
        tracker.load_state(saved)
    assert draws[0].equal(draws[1]) and not draws[0].equal(first)


def sharded(rank, size, fields, sequence_parallel):
    """Two processes share the GPU and talk through gloo, by way of the host."""
    groups = pool.groups(tp=size)
    loss, data_parallel = loss_and_gradients(fields, CUDA, groups, sequence_parallel=sequence_parallel)
    found = pieces(data_parallel)
    barrier(groups.world)
    return loss, found


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel(fields, sequence_parallel):
    expected, on_cpu = loss_and_gradients(fields, CPU, pool.groups())
    ranks = pool.run(2, sharded, fields, sequence_parallel)
    for loss, _ in ranks:
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert_gradients(assemble([found for _, found in ranks]), assemble([pieces(on_cpu)]))


class TestDevice:
    def test_choose(self):
        assert choose_device("auto", 0) == torch.device("cuda", 0) and choose_device("cpu", 0) == CPU
        assert torch.cuda.current_device() == 0

    def test_memory(self):
        before = memory_report(CUDA)
        held = torch.zeros(64 * 2**20, dtype=torch.uint8, device=CUDA)
        after = memory_report(CUDA)
        assert after.allocated - before.allocated == held.numel()
        assert after.total > after.peak_reserved >= after.peak_allocated >= after.allocated

    def test_peak(self):
        """Known GPUs have a figure; fp32 has none."""
        found = peak_tflops(CUDA, torch.bfloat16)
        assert found is None or found > 50
        assert peak_tflops(CUDA, torch.float32) is None
