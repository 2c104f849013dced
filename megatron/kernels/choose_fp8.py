"""The kernels of FP8 products: chosen once during set-up, for all layers that have such products."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from megatron.base.errors import ConfigError, first_line
from megatron.config.fp8 import BLOCKWISE, DELAYED, MXFP8, TENSORWISE, Fp8Config
from megatron.kernels.backends import cublaslt
from megatron.kernels.choose_quantize import choose_quantize
from megatron.kernels.fused import compare, failure_of, numbers, only_traced
from megatron.kernels.ops.fp8 import scaled_mm
from megatron.kernels.ops.fp8.emulated import Emulated
from megatron.kernels.ops.fp8.formats import FORMATS, Formats
from megatron.kernels.ops.fp8.linear import Fp8Linear
from megatron.kernels.ops.fp8.operands import Operands, blockwise, delayed, mxfp8, tensorwise
from megatron.kernels.ops.fp8.product import Product
from megatron.kernels.ops.fp8.quantize import SEPARATE, QuantizeKernels
from megatron.kernels.ops.linear import OutputGrad
from megatron.kernels.transformer_engine import Engine, EngineFp8

_TRIAL = 128  # tokens, inputs and outputs


class Fp8Kernels(NamedTuple):
    """How FP8 layers quantize and multiply. choice: "product (why not a better one)", for the start-up table.

    engine: if it is not None, linear layers are its own, and quantize and multiply by themselves.
    """

    product: Product
    quantize: QuantizeKernels
    choice: str
    engine: EngineFp8 | None = None


def choose_fp8(
    config: Fp8Config,
    device: torch.device,
    features: Mapping[str, tuple[int, int]],
    engine: Engine | None = None,
) -> Fp8Kernels:
    """Returns the kernels for this device. Raises ConfigError for a GPU that cannot multiply with the recipe.

    features: name -> (inputs, outputs) of this rank's part of each layer. engine: Transformer Engine, if it was asked
    for. It is tried, and leaves its place to torch where it cannot multiply.

    On a CPU the products are emulated: the same quantized numbers, multiplied in fp32.
    """
    if device.type != "cuda":
        return Fp8Kernels(Emulated(), SEPARATE, f"emulated in fp32 (the device is {device.type})")
    reasons = []
    if engine is not None:
        reason = engine.fp8.why_not(config.fp8_recipe) or failure_of(partial(_try_engine, engine.fp8, config, device))
        if reason is None:
            return Fp8Kernels(Emulated(), choose_quantize(device)[0], "Transformer Engine's products", engine.fp8)
        reasons.append(f"Transformer Engine's not: {reason}")
    assert config.fp8_format is not None
    missing = scaled_mm.why_not(config.fp8_recipe, device, config.fp8_format)
    if missing is not None:
        raise ConfigError(
            f"--fp8-format {config.fp8_format} --fp8-recipe {config.fp8_recipe} cannot run on this GPU: {missing}; "
            "give another --fp8-recipe, or train in --bf16 without --fp8-format"
        )
    for name, (inputs, outputs) in features.items():
        problem = scaled_mm.size_problem(name, outputs, inputs, config.fp8_recipe)
        if problem is not None:
            raise ConfigError(
                f"{problem}; change the size, lower --tensor-model-parallel-size, or give another --fp8-recipe"
            )
    quantize, why = choose_quantize(device)
    if why is not None:
        reasons.append(f"quantized in plain torch: {why}")
    add, why = choose_sums(config, device)
    if why is not None:
        reasons.append(f"weight gradients are added behind their products: {why}")
    choice = "torch's scaled products" + ("" if add is None else ", cuBLASLt's for sums of weight gradients")
    choice += f" ({'; '.join(reasons)})" if reasons else ""
    return Fp8Kernels(scaled_mm.ScaledMM(config.fp8_recipe, add), quantize, choice)


def choose_sums(config: Fp8Config, device: torch.device) -> tuple[scaled_mm.AddProduct | None, str | None]:
    """Returns what adds a weight's gradient to its sum in the product itself, and the reason why nothing does."""
    if only_traced():
        return None, "the run is only traced"
    try:
        add = cublaslt.CublasLt(cublaslt.loaded()).add_product
    except OSError as error:
        return None, first_line(error)
    failure = failure_of(partial(_try_sum, add, config, device))
    return (add, None) if failure is None else (None, failure)


def _try_sum(add: scaled_mm.AddProduct, config: Fp8Config, device: torch.device) -> None:
    """Raises an error if the weight gradient of two microbatches is not close to the emulated one."""
    assert config.fp8_format is not None
    formats, recipe = FORMATS[config.fp8_format], config.fp8_recipe
    x, grad = (
        numbers(device, torch.bfloat16, 2 * _TRIAL, wide, turns=turns)
        for wide, turns in ((3 * _TRIAL, 0.7), (_TRIAL, 1.1))
    )
    results = []
    for product in (scaled_mm.ScaledMM(recipe, add), Emulated()):
        main_grad = torch.ones(_TRIAL, 3 * _TRIAL, device=device)
        kernel = Fp8Linear(unit_operands(recipe, formats, device), product, keep_weight=False)
        for _ in range(2):
            kernel.weight_grad(main_grad, OutputGrad(grad), x, False)
        results.append((main_grad,))
    compare(*results)


def unit_operands(recipe: str, formats: Formats, device: torch.device) -> Operands:
    """Returns operands whose delayed scales are 1."""
    unit = torch.ones(1, device=device)
    return {
        DELAYED: lambda: delayed(formats, (unit, unit, unit), (unit.clone(), unit.clone(), unit.clone())),
        BLOCKWISE: lambda: blockwise(formats),
        MXFP8: lambda: mxfp8(formats),
        TENSORWISE: lambda: tensorwise(formats),
    }[recipe]()


def _try_engine(engine: EngineFp8, config: Fp8Config, device: torch.device) -> None:
    """Raises an error if a product cannot be taken, or is not close to the emulated one."""
    assert config.fp8_format is not None
    formats, recipe = FORMATS[config.fp8_format], config.fp8_recipe
    x, weight, grad = (numbers(device, torch.bfloat16, _TRIAL, _TRIAL, turns=turns) for turns in (0.7, 0.3, 1.1))
    unit, none = torch.ones(1, device=device), (None, None, None)
    scales, amaxes = (unit, unit, unit), (unit.clone(), unit.clone(), unit.clone())
    theirs = engine.layer(recipe, formats, device, scales, amaxes, none, keep_weight=True, weight_grad=None)
    results = []
    for kernel in (theirs, Fp8Linear(unit_operands(recipe, formats, device), Emulated(), keep_weight=True)):
        prepared, main_grad = kernel.prepare(grad, for_weight=True), torch.zeros(_TRIAL, _TRIAL, device=device)
        for overwrite in (True, False):
            kernel.weight_grad(main_grad, prepared, x, overwrite)
        results.append((kernel.output(x, weight), kernel.input_grad(prepared, weight), main_grad))
    compare(*results)
