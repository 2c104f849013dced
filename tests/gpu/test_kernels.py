"""CUDA kernels against their references."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.kernels.backends import flash
from megatron.kernels.choose import choose_kernels
from megatron.kernels.choose_attention import Needs, candidates
from megatron.kernels.ops import activation, attention, cross_entropy, norm, weight_grad
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments, segments_of
from tests.gpu.cuda import CPU, CUDA, NEEDS_CUDA
from tests.unit.kernels.close import outputs_and_gradients, random

pytestmark = NEEDS_CUDA
HALVES = [torch.bfloat16, torch.float16]
SCORES = Scores(0.1)


def off_by(found, expected):
    """Largest difference, relative to the largest element."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def adds_to_fp32(dtype):
    """Skips a test where torch (2.8 and 2.9) does not add a product of this dtype to an fp32 matrix."""
    reason = weight_grad.failure_of_mixed(CUDA, dtype)
    if reason:
        pytest.skip(reason)


class TestWeightGrad:
    @pytest.mark.parametrize("dtype", HALVES)
    @pytest.mark.parametrize(("n", "out", "inner"), [(256, 128, 64), (300, 56, 72)])
    def test_mixed(self, dtype, n, out, inner):
        """The product is accumulated and stored in fp32: no rounding to half precision anywhere."""
        adds_to_fp32(dtype)
        grad, x = (random(n, d, dtype=dtype, seed=s).to(CUDA) for s, d in ((0, out), (1, inner)))
        exact = grad.double().t() @ x.double()
        main_grad = torch.full((out, inner), float("nan"), device=CUDA)
        weight_grad.fused_mixed(main_grad, grad, x, True)
        assert off_by(main_grad, exact) < 1e-5
        weight_grad.fused_mixed(main_grad, grad, x, False)
        assert off_by(main_grad, 2 * exact) < 1e-5
        rounded = torch.zeros_like(main_grad)
        weight_grad.separate(rounded, grad, x, True)
        assert 1e-4 < off_by(rounded, exact) < 1e-2, "the reference rounds, so the difference can be seen"

    @pytest.mark.parametrize("dtype", HALVES)
    def test_into_a_slice_of_a_buffer(self, dtype):
        """As a layer calls it: a flat buffer's piece, a strided gradient."""
        buffer = torch.full((64 + 48 * 40 + 64,), 7.0, device=CUDA)
        main_grad = buffer[64 : 64 + 48 * 40].view(48, 40)
        grad = random(48, 96, dtype=dtype).to(CUDA).t()
        x = random(96, 40, dtype=dtype, seed=1).to(CUDA)
        weight_grad.fused_mixed(main_grad, grad, x, True)
        assert buffer[:64].eq(7).all() and buffer[-64:].eq(7).all()
        assert off_by(main_grad, grad.double().t() @ x.double()) < 1e-5

    def test_choose(self):
        """Fused if torch can do it, and with its reason if not."""
        kernel, missing = weight_grad.choose(True, CUDA, torch.bfloat16)
        assert kernel is (weight_grad.fused_mixed if missing is None else weight_grad.separate)
        if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10):
            assert missing is None


def attention_inputs(s, n, g, d, dtype, t=None):
    shapes = [(s, 2, n, d), (t or s, 2, g, d), (t or s, 2, g, d)]
    return [random(*shape, dtype=dtype, seed=seed).to(CUDA) for seed, shape in enumerate(shapes)]


def chosen(dtype, n=8, g=8, d=64, asked="flash", **fields):
    """(kernel, what the start-up table says) of a model with these heads."""
    config = ModelConfig(
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        num_layers=1,
        hidden_size=n * d,
        num_attention_heads=n,
        group_query_attention=n != g,
        num_query_groups=g if n != g else None,
        attention_backend=asked,
        **{"attention_dropout": 0.0, **fields},
    )
    kernels = choose_kernels(config, CUDA)
    return kernels.attention, kernels.attention_choice


class TestFlash:
    @pytest.fixture(autouse=True)
    def needs_ampere(self):
        reason = flash.missing(CUDA, torch.bfloat16)
        if reason:
            pytest.skip(f"no FlashAttention: {reason}")

    @pytest.mark.parametrize("dtype", HALVES)
    @pytest.mark.parametrize(("n", "g"), [(8, 8), (8, 2), (8, 1)])
    @pytest.mark.parametrize(("s", "d"), [(128, 64), (200, 128)])
    def test_against_the_reference(self, dtype, n, g, s, d):
        kernel, said = chosen(dtype, n, g, d)
        assert said.startswith("FlashAttention-")
        data = attention_inputs(s, n, g, d, dtype)
        upstream = random(s, 2, n * d, seed=9).to(CUDA)
        options = {"scores": SCORES, "segments": None, "window": None, "dropout": 0.0}
        found = outputs_and_gradients(lambda *x: kernel(*x, **options), data, upstream)
        exact = outputs_and_gradients(lambda *x: attention.unfused(*x, **options), [x.float() for x in data], upstream)
        for a, b in zip(found, exact, strict=True):
            assert off_by(a, b) < 4 * torch.finfo(dtype).eps

    @pytest.mark.parametrize("dtype", HALVES)
    @pytest.mark.parametrize(("n", "g"), [(8, 8), (8, 2)])
    @pytest.mark.parametrize("d", [64, 128, 20])
    @pytest.mark.parametrize("window", [1, 50, 199, 200])
    def test_window(self, dtype, n, g, d, window):
        """20 channels are no multiple of 8: by another kernel."""
        kernel, said = chosen(dtype, n, g, d, asked="auto", window_size=f"{window - 1},0")
        assert said.startswith("FlashAttention-") == (d != 20)
        data, upstream = attention_inputs(200, n, g, d, dtype), random(200, 2, n * d, seed=9).to(CUDA)
        options = {"scores": SCORES, "segments": None, "window": window, "dropout": 0.0}
        found = outputs_and_gradients(lambda *x: kernel(*x, **options), data, upstream)
        exact = outputs_and_gradients(lambda *x: attention.unfused(*x, **options), [x.float() for x in data], upstream)
        for a, b in zip(found, exact, strict=True):
            assert off_by(a, b) < 4 * torch.finfo(dtype).eps

    def test_auto_takes_it(self):
        """Where samples hold several documents. It has no fp32."""
        assert chosen(torch.bfloat16, asked="auto")[1].startswith("FlashAttention-")
        assert chosen(torch.float32, asked="auto")[1].startswith("memory-efficient (")
        with pytest.raises(ConfigError, match="the dtype is float32, it needs bf16 or fp16"):
            chosen(torch.float32)

    def test_heads_that_no_flash_takes(self):
        """With the reason, and the other kernel runs: forward and backward."""
        kernel, said = chosen(torch.bfloat16, 4, 4, 320, asked="auto")
        assert "FlashAttention-2: " in said
        data, upstream = attention_inputs(64, 4, 4, 320, torch.bfloat16), random(64, 2, 1280, seed=9).to(CUDA)
        options = {"scores": SCORES, "segments": None, "window": None, "dropout": 0.0}
        found = outputs_and_gradients(lambda *x: kernel(*x, **options), data, upstream)
        exact = outputs_and_gradients(lambda *x: attention.unfused(*x, **options), [x.float() for x in data], upstream)
        for a, b in zip(found, exact, strict=True):
            assert off_by(a, b) < 4 * torch.finfo(torch.bfloat16).eps

    def test_what_it_cannot_do_goes_elsewhere(self):
        """Segments and cached queries, beside the same without."""
        kernel, _ = chosen(torch.bfloat16, 4, 2)
        data = attention_inputs(64, 4, 2, 64, torch.bfloat16)
        one_document = Segments(torch.zeros(2, 64, dtype=torch.long, device=CUDA))
        whole = kernel(*data, scores=SCORES, segments=None, window=None, dropout=0.0)
        assert off_by(kernel(*data, scores=SCORES, segments=one_document, window=None, dropout=0.0), whole) < 0.02
        last = kernel(data[0][-5:], *data[1:], scores=SCORES, segments=None, window=None, dropout=0.0)
        assert off_by(last, whole[-5:]) < 0.02

    def test_dropout_follows_the_generator(self):
        kernel, said = chosen(torch.bfloat16, 4, 2, attention_dropout=0.5)
        assert said.startswith("FlashAttention-2")
        data = attention_inputs(64, 4, 2, 64, torch.bfloat16)
        results = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            results.append(kernel(*data, scores=SCORES, segments=None, window=None, dropout=0.5))
        assert results[0].equal(results[1]) and not results[0].equal(results[2])


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("segmented", [True, False])
@pytest.mark.parametrize("window", [None, 50])
def test_deterministic_mode_has_a_gradient_for_everything(dtype, segmented, window, deterministic):
    """torch raises where it has none. Long enough for the memory-efficient kernel to split keys, which it must not."""
    kernel, _ = chosen(dtype, 8, 8, asked="auto", window_size=None if window is None else f"{window - 1},0")
    s = 1024
    data, upstream = attention_inputs(s, 8, 8, 64, dtype), random(s, 2, 512, seed=9).to(CUDA)
    segments = segments_of((torch.arange(s) // 300).expand(2, s), CUDA) if segmented else None
    options = {"scores": SCORES, "segments": segments, "window": window, "dropout": 0.0}
    found = [outputs_and_gradients(lambda *x: kernel(*x, **options), data, upstream) for _ in range(3)]
    assert all(a.equal(b) for again in found[1:] for a, b in zip(found[0], again, strict=True))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("number", range(4), ids=[each.name for each in candidates("auto")])
@pytest.mark.parametrize("segmented", [True, False])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("g", [8, 2])
def test_every_candidate(number, dtype, segmented, window, g):
    """Each by itself, where it says that it can run."""
    candidate = candidates("auto")[number]
    needs = Needs(CUDA, dtype, 64, 64, 8 // g, window is not None, 0.0, None, segmented)
    reason = candidate.missing(needs) or (None if candidate.load is None else candidate.load(needs))
    if reason:
        pytest.skip(f"{candidate.name}: {reason}")
    data, upstream = attention_inputs(200, 8, g, 64, dtype), random(200, 2, 512, seed=9).to(CUDA)
    segments = segments_of((torch.arange(200) // 70).expand(2, 200), CUDA) if segmented else None
    options = {"scores": SCORES, "segments": segments, "window": window, "dropout": 0.0}
    found = outputs_and_gradients(lambda *x: candidate.tried(*x, **options), data, upstream)
    exact = outputs_and_gradients(lambda *x: attention.unfused(*x, **options), [x.double() for x in data], upstream)
    for a, b in zip(found, exact, strict=True):
        assert off_by(a, b) < max(1e-5, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION])
def test_masks_on_cuda(backend):
    """Segments through each kernel that takes masks."""
    data = attention_inputs(96, 4, 4, 64, torch.bfloat16)
    segments = Segments(torch.arange(96, device=CUDA).div(40, rounding_mode="floor").expand(2, 96))
    exact = attention.unfused(*(x.float() for x in data), scores=SCORES, segments=segments, window=None, dropout=0.0)
    with sdpa_kernel(backend):
        assert off_by(attention.fused(*data, scores=SCORES, segments=segments, window=None, dropout=0.0), exact) < 0.02


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("window", [None, 50])
def test_capped_scores(dtype, window):
    kernel, said = chosen(dtype, 8, 2, asked="auto", attn_logit_softcapping=1.5)
    assert said.startswith(("FlashAttention-3", "math ("))
    data, upstream = attention_inputs(200, 8, 2, 64, dtype), random(200, 2, 512, seed=9).to(CUDA)
    options = {"scores": Scores(0.1, 1.5), "segments": None, "window": window, "dropout": 0.0}
    found = outputs_and_gradients(lambda *x: kernel(*x, **options), data, upstream)
    exact = outputs_and_gradients(lambda *x: attention.unfused(*x, **options), [x.float() for x in data], upstream)
    for a, b in zip(found, exact, strict=True):
        assert off_by(a, b) < max(1e-5, 4 * torch.finfo(dtype).eps)


KERNELS = {
    "rms_norm": (lambda x, w: norm.rms_norm(x, w, 1e-5), [(64, 3, 256), (256,)]),
    "layer_norm": (lambda x, w, b: norm.layer_norm(x, w, b, 1e-5), [(64, 3, 256), (256,), (256,)]),
    "swiglu": (activation.swiglu, [(64, 3, 256)]),
    "gelu": (activation.gelu, [(64, 3, 256)]),
    "gelu_tanh": (activation.gelu_tanh, [(64, 3, 256)]),
    "squared_relu": (activation.squared_relu, [(64, 3, 256)]),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_as_on_the_cpu(name, dtype):
    kernel, shapes = KERNELS[name]
    data = [random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    upstream = random(*kernel(*data).shape, seed=9)
    expected = outputs_and_gradients(kernel, data, upstream)
    found = outputs_and_gradients(kernel, [x.to(CUDA) for x in data], upstream.to(CUDA))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and off_by(a, b) < max(1e-5, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_cross_entropy_as_on_the_cpu(dtype):
    logits, targets, grad = random(300, 1000, dtype=dtype, scale=3.0), torch.arange(300), random(300, seed=1)
    results = []
    for device in (CPU, CUDA):
        local, ids = logits.to(device).clone(), targets.to(device)
        largest, total, target = cross_entropy.local_statistics(local, ids, 100)
        log_sum_exp = total.log() + largest
        cross_entropy.gradient_(local, ids, 100, log_sum_exp, grad.to(device))
        results.append((largest, total, target, local))
    for a, b in zip(*results, strict=True):
        assert off_by(b, a) < max(1e-5, 2 * torch.finfo(dtype).eps)
