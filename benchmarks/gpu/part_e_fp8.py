"""Part E: FP8: the quantized numbers and products of every recipe against the CPU's, their times, training, and
Transformer Engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Result, Setting, check, measuring
from benchmarks.gpu.measure import check_error, copy_rate, error, package, poison, random, timed
from benchmarks.gpu.record import NotRunError
from benchmarks.gpu.runs import DECODER_FP8, FP8_FORMATS, device_of, fp8_flags, losses, start
from benchmarks.gpu.shapes import layer_products
from megatron.config.fp8 import Fp8Config
from megatron.kernels.choose_fp8 import choose_fp8
from megatron.kernels.ops import weight_grad
from megatron.kernels.ops.fp8 import scaled_mm
from megatron.kernels.ops.fp8.emulated import Emulated
from megatron.kernels.ops.fp8.formats import FORMATS, largest
from megatron.kernels.ops.fp8.linear import Fp8Linear
from megatron.kernels.ops.fp8.operands import Operands, blockwise, delayed, mxfp8, tensorwise
from megatron.kernels.ops.fp8.product import Product
from megatron.kernels.ops.fp8.quantize import SEPARATE, Both, QuantizeKernels, scale_of
from megatron.kernels.ops.linear import PlainLinear

# The product of the same FP8 numbers: rounded to bf16, and accumulated with about 14 bits on Hopper.
PRODUCT_LIMIT = 2.0**-7
# Quantized to e4m3 (4 bits) or e5m2 (3 bits), relative to the largest element of a product over many numbers.
QUANTIZED_LIMIT = 0.1
LARGEST = 6.0  # more than the random numbers have, for scales that are known beforehand
KINDS = ("output", "input gradient", "weight gradient")
TRAINED_STEPS, TRAINED_LIMIT = 6, 0.03  # of the first loss
TE_RECIPES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}


def cases(setting: Setting) -> list[Case]:
    """Returns the cases of this part."""
    of = functools.partial
    recipes = scaled_mm.RECIPES
    return [
        *(
            Case(f"{recipe} against the CPU", of(compare, setting, recipe), measuring(0, compiled=3))
            for recipe in recipes
        ),
        *(Case(f"{recipe} times", of(times, setting, recipe), measuring(16)) for recipe in recipes),
        *(Case(f"{recipe} sums", of(sums, setting, recipe), measuring(12)) for recipe in recipes),
        Case("quantization", of(quantization, setting), measuring(2 * len(recipes))),
        # Small models: their time is that of the kernels that are compiled.
        Case("training", of(train, setting), measuring(0, compiled=4 * len(recipes))),
        *(
            Case(f"Transformer Engine, {name}", of(transformer_engine, setting, kind), measuring(4, compiled=2))
            for name, kind in TE_RECIPES.items()
        ),
    ]


def kernels_of(setting: Setting, recipe: str) -> tuple[Product, QuantizeKernels]:
    """Returns what a run with this recipe takes. Raises NotRunError on a GPU that cannot multiply with it."""
    reason = scaled_mm.why_not(recipe, device_of(setting), FP8_FORMATS[recipe])
    if setting.cuda and reason is not None:
        raise NotRunError(reason)
    config = Fp8Config(fp8_format=FP8_FORMATS[recipe], fp8_recipe=recipe)
    product, quantize, *_ = choose_fp8(config, device_of(setting), {})
    return product, quantize


def operands_of(recipe: str, device: torch.device, kernels: QuantizeKernels) -> Operands:
    """Returns the operands of a layer. The scales of `delayed` are made for numbers up to LARGEST."""
    formats = FORMATS[FP8_FORMATS[recipe]]
    if recipe == "delayed":
        of = (formats.forward, formats.forward, formats.gradient)
        most = [torch.tensor([largest(each)], device=device) for each in of]
        scales = [scale_of(torch.full((1,), LARGEST, device=device), each) for each in most]
        amaxes = [torch.zeros(1, device=device) for _ in scales]
        return delayed(formats, (scales[0], scales[1], scales[2]), (amaxes[0], amaxes[1], amaxes[2]), kernels)
    if recipe == "tensorwise":
        return tensorwise(formats, kernels=kernels)
    return {"blockwise": blockwise, "mxfp8": mxfp8}[recipe](formats, kernels)


def layer_data(setting: Setting, tokens: int, width: int, out: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns an input [tokens, width], a weight [out, width] and a gradient of the output [tokens, out]."""
    x, weight, grad = (
        random(*shape, setting=setting, seed=seed)
        for seed, shape in enumerate(((tokens, width), (out, width), (tokens, out)))
    )
    return x, weight, grad


def products(linear: Fp8Linear | PlainLinear, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """Returns the three products of a linear layer; the gradient of the weight is added to itself, in fp32."""
    prepared = linear.prepare(grad, for_weight=True)
    main_grad = torch.full(weight.shape, float("nan"), device=weight.device)
    for overwrite in (True, False):
        linear.weight_grad(main_grad, prepared, x, overwrite)
    return [linear.output(x, weight), linear.input_grad(prepared, weight), main_grad]


def compare(setting: Setting, recipe: str) -> Result:
    """Checks that the device quantizes to the CPU's bits, and that its products are those of the quantized numbers."""
    product, quantize = kernels_of(setting, recipe)
    device, cpu = device_of(setting), torch.device("cpu")
    data = layer_data(setting, setting.size(1024, 256), setting.size(1024, 256), setting.size(512, 256))
    ours, theirs = operands_of(recipe, device, quantize), operands_of(recipe, cpu, SEPARATE)
    for name, operand, expected, x in zip(ours._fields, ours, theirs, data, strict=True):
        found, on_cpu = operand(x, rows=True, columns=True), expected(x.cpu(), rows=True, columns=True)
        check(bits(found) == bits(on_cpu), f"{name}: other bits than on the CPU")
    runs_here = scaled_mm.why_not(recipe, device, FP8_FORMATS[recipe]) is None
    multiplied = scaled_mm.ScaledMM(recipe) if runs_here else product
    emulated = products(Fp8Linear(theirs, Emulated(), keep_weight=True), *(x.cpu() for x in data))
    exact = products(PlainLinear(weight_grad.separate), *(x.cpu().double() for x in data))
    poison(setting)
    found_products = products(Fp8Linear(ours, multiplied, keep_weight=True), *data)
    values: dict[str, Any] = {}
    for kind, ours_, same, wide in zip(KINDS, found_products, emulated, exact, strict=True):
        values[f"{kind}, product"] = check_error(ours_.cpu(), same, PRODUCT_LIMIT, f"{kind} against the emulation")
        values[f"{kind}, quantized"] = check_error(ours_.cpu(), wide, QUANTIZED_LIMIT, f"{kind} against fp64")
    words = (f"{kind} {values[f'{kind}, product']:.0e} / {values[f'{kind}, quantized']:.0e}" for kind in KINDS)
    how = (
        "" if isinstance(multiplied, scaled_mm.ScaledMM) else " (torch multiplies it on a GPU only: here the emulation)"
    )
    return Result(f"same bits as on the CPU; error against the emulation / fp64: {', '.join(words)}{how}", values)


def bits(both: Both) -> list[bytes]:
    """Returns the bytes of the numbers and factors of both directions."""
    assert both.rows is not None and both.columns is not None
    tensors = [each for q in (both.rows, both.columns) for each in (q.data, q.inverse)]
    return [each.cpu().contiguous().view(torch.uint8).numpy().tobytes() for each in tensors]


def times(setting: Setting, recipe: str) -> Result:
    """Measures the three products of the four linear layers, as a run computes them: with the quantization of input and
    output gradient, and a weight that was quantized before."""
    product, quantize = kernels_of(setting, recipe)
    values: dict[str, Any] = {}
    for layer, shape in layer_products(setting).items():
        x, weight, grad = layer_data(setting, *shape)
        linear = Fp8Linear(operands_of(recipe, device_of(setting), quantize), product, keep_weight=True)
        prepared = linear.prepare(grad, for_weight=True)
        main_grad = torch.zeros(weight.shape, device=weight.device)
        runs: dict[str, Callable[[], Any]] = {
            "output": functools.partial(linear.output, x, weight),
            "input gradient": functools.partial(linear.input_grad, prepared, weight),
            "weight gradient": functools.partial(linear.weight_grad, main_grad, prepared, x, False),
            "gradient quantized": functools.partial(linear.prepare, grad, for_weight=True),
        }
        flops, total = 2 * shape[0] * shape[1] * shape[2], 0.0
        for kind, run in runs.items():
            timing = timed(run, setting)
            total += timing.ms
            values[f"{layer}, {kind}"] = timing.ms
        values[f"{layer}, tflops"] = 3 * flops / (total / 1e3) / 1e12
    words = (f"{layer} {values[f'{layer}, tflops']:.4g}" for layer in layer_products(setting))
    return Result(f"TFLOP/s of the three products with quantization: {', '.join(words)}", values)


def sums(setting: Setting, recipe: str) -> Result:
    """Measures a weight gradient that is added to its fp32 sum: the product alone, which overwrites; what a run takes,
    which adds in the product where the device can; the product and an addition; and the product in bf16 that adds."""
    run_product, quantize = kernels_of(setting, recipe)
    apart = scaled_mm.ScaledMM(recipe)
    values: dict[str, Any] = {}
    for layer, shape in layer_products(setting).items():
        x, weight, grad = layer_data(setting, *shape)
        of = operands_of(recipe, device_of(setting), quantize)
        columns = [operand(y, rows=False, columns=True).columns for operand, y in ((of.gradient, grad), (of.input, x))]
        a, b = (run_product.ready(column) for column in columns if column is not None)
        total = torch.zeros(weight.shape, device=weight.device)
        runs: dict[str, Callable[[], Any]] = {
            "product": functools.partial(run_product, a, b, total, fast=False),
            "added": functools.partial(run_product.add, a, b, total),
            "bf16": functools.partial(weight_grad.choose(True, device_of(setting), x.dtype)[0], total, grad, x, False),
        }
        if setting.cuda:
            runs["product, then added"] = functools.partial(apart.add, a, b, total)
        for name, call in runs.items():
            values[f"{layer}, {name}"] = timed(call, setting).rate(2 * shape[0] * shape[1] * shape[2]) / 1e12
    words = (f"{name} {rate:.4g}" for name, rate in values.items())
    return Result(f"TFLOP/s: {'; '.join(words)}", values)


def quantization(setting: Setting) -> Result:
    """Measures the quantization of an input in both directions: it reads 2 bytes per element and writes 2."""
    x = random(*layer_products(setting)["fc1"][:2], setting=setting, seed=0)
    device, ceiling, values = device_of(setting), copy_rate(setting), dict[str, float]()
    for recipe in scaled_mm.RECIPES:
        try:
            _, quantize = kernels_of(setting, recipe)
        except NotRunError:
            continue
        ways = {"plain": SEPARATE, **({} if quantize is SEPARATE else {"framework": quantize})}
        for way, kernels in ways.items():
            operand = operands_of(recipe, device, kernels).input
            timing = timed(functools.partial(operand, x, rows=True, columns=True), setting)
            values[f"{recipe}, {way}"] = timing.rate(4 * x.numel()) / 1e9
    shares = (f"{name} {rate:.4g} ({100 * rate / ceiling:.0f} %)" for name, rate in values.items())
    return Result(f"GB/s (share of a copy): {'; '.join(shares)}", values)


def train(setting: Setting) -> Result:
    """Trains some steps in FP8 by every recipe that runs here: the losses stay near those of bf16."""
    groups, plain = start(setting), f"{DECODER_FP8} --bf16"
    expected = losses(plain, TRAINED_STEPS, setting, groups)
    values: dict[str, Any] = {"bf16": expected}
    words = []
    for recipe in scaled_mm.RECIPES:
        try:
            kernels_of(setting, recipe)
        except NotRunError as reason:
            words.append(f"{recipe} not: {reason}")
            continue
        found = losses(f"{plain} {fp8_flags(recipe)}", TRAINED_STEPS, setting, groups)
        off = max(abs(a - b) for a, b in zip(found, expected, strict=True)) / expected[0]
        values[recipe] = found
        check(off <= TRAINED_LIMIT, f"{recipe}: losses {found} and not {expected}", values)
        words.append(f"{recipe} {100 * off:.2g} %")
    return Result(f"{TRAINED_STEPS} losses, away from those of bf16: {', '.join(words)}", values)


def transformer_engine(setting: Setting, kind: str) -> Result:
    """Compares a linear layer of Transformer Engine in FP8 with bf16 of torch, and measures both passes together."""
    te = package("transformer_engine.pytorch")
    recipes = package("transformer_engine.common.recipe")
    setting.needs_cuda("Transformer Engine")
    recipe = getattr(recipes, kind)()
    values: dict[str, Any] = {}
    for layer, (tokens, width, out) in layer_products(setting).items():
        x, weight, grad = (
            random(*shape, setting=setting, seed=seed, scale=scale)
            for seed, (shape, scale) in enumerate((((tokens, width), 1.0), ((out, width), 0.02), ((tokens, out), 1.0)))
        )
        x.requires_grad_()
        linear = te.Linear(width, out, bias=False, params_dtype=torch.bfloat16, device="cuda")
        with torch.no_grad():
            linear.weight.copy_(weight)
        del weight

        def passes(linear: Any = linear, x: Tensor = x, grad: Tensor = grad) -> list[Tensor]:
            with te.autocast(enabled=True, recipe=recipe):
                y = linear(x)
            return [y, *torch.autograd.grad(y, (x, linear.weight), grad)]

        passes()  # delayed scaling knows the largest values of earlier steps only
        poison(setting)
        found = passes()
        plain = linear.weight.detach()
        expected = [x.detach() @ plain.t(), grad @ plain, grad.t() @ x.detach()]
        off = max(error(a.detach(), b) for a, b in zip(found, expected, strict=True))
        check(off <= QUANTIZED_LIMIT, f"{layer}: error {off:.1e} against bf16")
        values[f"{layer}_error"] = off
        values[f"{layer}_tflops"] = timed(passes, setting).rate(6 * tokens * width * out) / 1e12
    words = (f"{layer} {values[f'{layer}_tflops']:.4g}" for layer in layer_products(setting))
    worst = max(value for name, value in values.items() if name.endswith("_error"))
    return Result(f"TFLOP/s of both passes, casts included: {', '.join(words)}; error {worst:.0e}", values)
