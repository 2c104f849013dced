"""Part E: products in fp8 by three recipes of scales against an emulation on the CPU, casts, and Transformer Engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Result, Setting, check
from benchmarks.gpu.fp8 import RECIPES, Quantized, dequantized, product, quantize
from benchmarks.gpu.measure import check_error, copy_rate, error, package, poison, random, timed
from benchmarks.gpu.record import LaterError, NotRunError
from benchmarks.gpu.shapes import layer_products

# The product of the same fp8 numbers: rounded to bf16, and accumulated with about 14 bits on Hopper.
PRODUCT_LIMIT = 2.0**-7
# Quantized to e4m3 (4 bits) or e5m2 (3 bits), relative to the largest element of a product over many numbers.
QUANTIZED_LIMIT = 0.1
TE_RECIPES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}


class Operands(NamedTuple):
    """The operands of a linear layer's three products, each as (a [m, k], b [n, k]) of a @ b.t()."""

    fprop: tuple[Tensor, Tensor]
    dgrad: tuple[Tensor, Tensor]
    wgrad: tuple[Tensor, Tensor]


def cases(setting: Setting) -> list[Case]:
    """Returns the cases of this part."""
    of = functools.partial
    return [
        *(Case(f"{name} against the CPU", of(compare, setting, name), 4.0) for name in RECIPES),
        *(Case(f"{name} times", of(times, setting, name), 6.0) for name in RECIPES),
        Case("cast", of(cast, setting), 6.0),
        *(
            Case(f"Transformer Engine, {name}", of(transformer_engine, setting, kind), 8.0)
            for name, kind in TE_RECIPES.items()
        ),
        Case("framework", framework),
    ]


def framework() -> Result:
    """Training of the framework in fp8."""
    raise LaterError("the framework does not train in fp8")


def needs_fp8(setting: Setting) -> None:
    """Raises NotRunError on a GPU without fp8 products."""
    if setting.cuda and torch.cuda.get_device_capability() < (8, 9):
        raise NotRunError("fp8 products need a GPU of compute capability 8.9 or more")


def operands(setting: Setting, tokens: int, width: int, out: int) -> Operands:
    """Returns random operands of a layer [tokens, width] -> [tokens, out]. All are contiguous along k, as fp8 wants."""
    x, weight, grad = (
        random(*shape, setting=setting, seed=seed)
        for seed, shape in enumerate(((tokens, width), (out, width), (tokens, out)))
    )
    return Operands((x, weight), (grad, weight.t().contiguous()), (grad.t().contiguous(), x.t().contiguous()))


def compare(setting: Setting, name: str) -> Result:
    """Checks that the device quantizes to the CPU's bits, and that its products are those of the quantized numbers."""
    needs_fp8(setting)
    sizes = (setting.size(1024, 256), setting.size(1024, 256), setting.size(512, 256))
    multiplies = setting.cuda or name != "blockwise"
    values: dict[str, Any] = {}
    for kind, (a, b) in operands(setting, *sizes)._asdict().items():
        gradient = kind != "fprop"
        pair = quantize(a, name, gradient=gradient), quantize(b, name, weight=kind != "wgrad")
        on_cpu = quantize(a.cpu(), name, gradient=gradient), quantize(b.cpu(), name, weight=kind != "wgrad")
        for side, ours, theirs in zip("ab", pair, on_cpu, strict=True):
            same = torch.equal(ours.data.view(torch.uint8).cpu(), theirs.data.view(torch.uint8))
            check(
                same and torch.equal(ours.inverse.cpu(), theirs.inverse),
                f"{kind}: {side} has other bits than on the CPU",
            )
        emulated = dequantized(on_cpu[0]) @ dequantized(on_cpu[1]).t()
        exact = a.cpu().double() @ b.cpu().double().t()
        poison(setting)
        found = product(*pair).cpu() if multiplies else emulated
        values[f"{kind}_product"] = check_error(found, emulated, PRODUCT_LIMIT, f"{kind} against the emulation")
        values[f"{kind}_quantized"] = check_error(found, exact, QUANTIZED_LIMIT, f"{kind} against fp64")
    words = (f"{kind} {values[f'{kind}_product']:.0e} / {values[f'{kind}_quantized']:.0e}" for kind in Operands._fields)
    how = "" if multiplies else " (torch multiplies blocks on a GPU only: here the emulation itself)"
    return Result(f"same bits as on the CPU; error against the emulation / fp64: {', '.join(words)}{how}", values)


def times(setting: Setting, name: str) -> Result:
    """Measures the three products of the four linear layers, without the casts."""
    needs_fp8(setting)
    if name == "blockwise":
        setting.needs_cuda(f"the product of {name} fp8 numbers")
    values: dict[str, Any] = {}
    for layer, shape in layer_products(setting).items():
        for kind, (a, b) in operands(setting, *shape)._asdict().items():
            pair = quantize(a, name, gradient=kind != "fprop"), quantize(b, name, weight=kind != "wgrad")
            timing = timed(functools.partial(product, *pair), setting)
            values[f"{layer}_{kind}"] = timing.rate(2 * a.shape[0] * b.shape[0] * a.shape[1]) / 1e12
    words = (
        f"{layer} " + " / ".join(f"{values[f'{layer}_{kind}']:.4g}" for kind in Operands._fields)
        for layer in layer_products(setting)
    )
    return Result(f"TFLOP/s fprop / dgrad / wgrad: {', '.join(words)}", values)


def cast(setting: Setting) -> Result:
    """Measures the cast to fp8 with its scales, as plain torch and compiled; three bytes per element at least."""
    x = random(*layer_products(setting)["fc1"][:2], setting=setting, seed=0)
    ceiling, values = copy_rate(setting), {}
    for name in RECIPES:
        plain: Callable[[Tensor], Quantized] = functools.partial(quantize, recipe=name)
        compiled = torch.compile(plain, backend="aot_eager" if setting.toy else "inductor")
        for way, function in (("plain", plain), ("inductor", compiled)):
            rate = timed(functools.partial(function, x), setting).rate(3 * x.numel()) / 1e9
            values[f"{name}_{way}"] = rate
    shares = (f"{name.replace('_', ' ')} {rate:.4g} ({100 * rate / ceiling:.0f} %)" for name, rate in values.items())
    return Result(f"GB/s (share of a copy): {', '.join(shares)}", values)


def transformer_engine(setting: Setting, kind: str) -> Result:
    """Compares a linear layer of Transformer Engine in fp8 with bf16 of torch, and measures both passes together."""
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
