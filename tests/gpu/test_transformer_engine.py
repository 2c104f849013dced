"""Transformer Engine's own kernels on a GPU; tests/unit/kernels/test_transformer_engine.py has our side of the
calls."""

import importlib.util

import pytest
import torch

from megatron.config.fp8 import Fp8Config
from megatron.config.model import ModelConfig
from megatron.kernels.choose import choose_kernels
from megatron.kernels.choose_fp8 import choose_fp8
from megatron.kernels.fused import SEPARATE
from megatron.kernels.ops import attention, weight_grad
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import segments_of
from megatron.kernels.ops.fp8.emulated import Emulated
from megatron.kernels.ops.fp8.formats import FORMATS, largest
from megatron.kernels.ops.fp8.quantize import amax_of, scale_of
from megatron.kernels.ops.linear import OutputGrad, PlainLinear
from megatron.kernels.ops.norm import ResidualNorm, compute_add_norm, gradient_add_norm, own
from megatron.kernels.transformer_engine import choose_layers, find_engine
from tests.gpu.cuda import CUDA, NEEDS_CUDA
from tests.unit.kernels.close import random
from tests.unit.kernels.fp8 import layer as fp8_layer
from tests.unit.kernels.fp8.layer import RECIPES
from tests.unit.models.builds import GPT, LLAMA

MISSING = importlib.util.find_spec("transformer_engine") is None
pytestmark = [*NEEDS_CUDA, pytest.mark.skipif(MISSING, reason="Transformer Engine is not installed")]
HALVES = [torch.bfloat16, torch.float16]
ROUNDING = 2e-2  # of the largest element
HEADS = {"num_attention_heads": 4, "hidden_size": 256, "ffn_hidden_size": 512}  # heads of 64 channels


@pytest.fixture
def engine():
    found, _ = find_engine("transformer_engine", CUDA)
    return found


def draw(*shape, dtype=torch.bfloat16, seed=0):
    return random(*shape, dtype=dtype, seed=seed).to(CUDA)


def assert_near(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert float((a.float() - b.float()).abs().max()) <= ROUNDING * float(b.float().abs().max())


@pytest.mark.parametrize(
    "fields",
    [{**LLAMA, **HEADS, "num_query_groups": 2}, {**GPT, **HEADS, "openai_gelu": True}],
    ids=["llama", "gpt"],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_all_kernels_of_a_model_are_taken(engine, fields, dtype):
    config = ModelConfig(**fields, **{dtype: True}, transformer_impl="transformer_engine")
    kernels = choose_kernels(config, CUDA)
    assert " not: " not in kernels.layers_choice, kernels.layers_choice
    assert kernels.attention_choice == "Transformer Engine's cuDNN"


@pytest.mark.parametrize("dtype", HALVES)
def test_products(engine, dtype):
    x, grad = draw(48, 3, 256, dtype=dtype), draw(48, 3, 512, dtype=dtype, seed=1)
    weight, bias = draw(512, 256, dtype=dtype, seed=2), draw(512, dtype=dtype, seed=3)
    results = []
    for kernel in (engine.linear(engine.weight_grad), PlainLinear(weight_grad.fused_mixed)):
        main_grad, out, back = torch.zeros(512, 256, device=CUDA), grad.new_empty(100, 512), grad.new_empty(100, 256)
        for overwrite in (True, False, False):
            kernel.weight_grad(main_grad, OutputGrad(grad), x, overwrite)
        kernel.output_rows(weight, bias)(x.flatten(0, 1)[20:120], out)
        kernel.input_grad_rows(weight)(grad.flatten(0, 1)[20:120], back)
        whole = kernel.output(x, weight, bias), kernel.input_grad(OutputGrad(grad), weight)
        results.append((*whole, main_grad, out, back))
    assert_near(*results)


@pytest.mark.parametrize("width", [128, 4096, 8192])
@pytest.mark.parametrize("dtype", HALVES)
def test_norms(engine, width, dtype):
    x, grad = draw(700, width, dtype=dtype), draw(700, width, dtype=dtype, seed=1)
    weight, bias = draw(width, dtype=dtype, seed=2), draw(width, dtype=dtype, seed=3)
    results = []
    ours = ResidualNorm(compute_add_norm, gradient_add_norm)
    for kernel, of_sum in ((engine.norm, engine.norm.residual), (SEPARATE.norm, ours)):
        out, rstd = kernel.compute_rms_norm(x, weight, 1e-5, own)
        centered, statistics = kernel.compute_layer_norm(x, weight, bias, 1e-5)
        results.append(
            (
                *(out, rstd, centered),
                *kernel.gradient_rms_norm(grad, x, weight, rstd, own),
                *kernel.gradient_layer_norm(grad, x, weight, bias, statistics),
                of_sum.gradient_add_norm(grad, x, x, weight, None, (rstd, rstd))[0],
            )
        )
    assert_near(*results)


@pytest.mark.parametrize("name", ["swiglu", "geglu_tanh", "gelu_tanh", "squared_relu"])
def test_activations(engine, name):
    x = draw(300, 1024)
    results = []
    for kernel in (engine.activations[name], SEPARATE.activations[name]):
        out = kernel.compute(x)[0]
        results.append((out, kernel.gradient_of_input(draw(*out.shape, seed=1), x)))
    assert_near(*results)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("head", [64, 128])
def test_attention(engine, window, documents, head):
    shapes = (512, 2, 8, head), (512, 2, 2, head), (512, 2, 2, head)
    data = [draw(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    ids = torch.arange(512) // 200
    segments = segments_of(torch.stack([ids, ids.flip(0)]), CUDA) if documents else None
    results = []
    for kernel in (engine.attention_alone, attention.unfused):
        leaves = [x.clone().requires_grad_() for x in data]
        out = kernel(*leaves, scores=Scores(head**-0.5), segments=segments, window=window, dropout=0.0)
        results.append([out, *torch.autograd.grad(out, leaves, draw(*out.shape, seed=9))])
    assert_near(*results)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_products(engine, recipe, formats):
    """Against the emulation, which quantizes to the same bits; tokens and sizes that are no multiples of 128."""
    reason = engine.fp8.why_not(recipe)
    if reason is not None:
        pytest.skip(reason)
    tensors = [each.to(CUDA) for each in fp8_layer.draw(300, 192, 320)]
    dtypes = FORMATS[formats].forward, FORMATS[formats].forward, FORMATS[formats].gradient
    scales = tuple(scale_of(amax_of(x), largest(of)) for x, of in zip(tensors, dtypes, strict=True))
    amaxes = tuple(torch.zeros(1, device=CUDA) for _ in range(3))
    theirs = engine.fp8.layer(
        recipe, FORMATS[formats], CUDA, scales, amaxes, (None, None, None), keep_weight=True, weight_grad=None
    )
    ours = fp8_layer.make_kernel(recipe, formats, tensors, Emulated())
    assert_near(*(fp8_layer.products(kernel, *tensors) for kernel in (theirs, ours)))
    if recipe == "delayed":
        assert [float(amax) for amax in amaxes] == [float(x.abs().max()) for x in tensors]
    x, _, grad = tensors
    main_grad = torch.ones(192, 320, device=CUDA)
    theirs.weight_grad(main_grad, theirs.prepare(grad, for_weight=True), x, False)
    assert_near([main_grad - 1], [fp8_layer.products(ours, *tensors)[2]])


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_fp8_is_taken(engine, recipe):
    if engine.fp8.why_not(recipe) is not None:
        pytest.skip(engine.fp8.why_not(recipe))
    found = choose_fp8(Fp8Config(fp8_format="hybrid", fp8_recipe=recipe), CUDA, {}, engine)
    assert found.choice == "Transformer Engine's products"


def test_dropout_is_the_same_when_recomputed(engine):
    data = [draw(256, 1, 4, 64, seed=seed).requires_grad_() for seed in range(3)]
    outs = []
    for _ in range(2):
        torch.cuda.manual_seed(3)
        with torch.set_grad_enabled(not outs):
            outs.append(engine.attention_alone(*data, scores=Scores(0.125), segments=None, window=None, dropout=0.3))
    assert outs[0].equal(outs[1])


def test_fp32_keeps_our_products(engine):
    plain = PlainLinear(weight_grad.fused)
    chosen = choose_layers(engine, ModelConfig(**LLAMA), CUDA, torch.float32, plain)
    assert chosen.linear is plain
