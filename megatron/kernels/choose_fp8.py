"""The kernels of FP8 products: chosen once during set-up, for all layers that have such products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from megatron.base.errors import ConfigError
from megatron.config.fp8 import Fp8Config
from megatron.kernels.ops.fp8 import scaled_mm
from megatron.kernels.ops.fp8.emulated import Emulated
from megatron.kernels.ops.fp8.product import Product
from megatron.kernels.ops.fp8.quantize import SEPARATE, QuantizeKernels


class Fp8Kernels(NamedTuple):
    """How FP8 layers quantize and multiply. choice: "product (why not a better one)", for the start-up table."""

    product: Product
    quantize: QuantizeKernels
    choice: str


def choose_fp8(config: Fp8Config, device: torch.device, features: Mapping[str, tuple[int, int]]) -> Fp8Kernels:
    """Returns the kernels for this device. Raises ConfigError for a GPU that cannot multiply with the recipe.

    features: name -> (inputs, outputs) of this rank's part of each layer.

    On a CPU the products are emulated: the same quantized numbers, multiplied in fp32.
    """
    if device.type != "cuda":
        return Fp8Kernels(Emulated(), SEPARATE, f"emulated in fp32 (the device is {device.type})")
    missing = scaled_mm.why_not(config.fp8_recipe, device)
    if missing is not None:
        raise ConfigError(
            f"--fp8-format {config.fp8_format} --fp8-recipe {config.fp8_recipe} cannot run on this GPU: {missing}; give "
            "another --fp8-recipe, or train in --bf16 without --fp8-format"
        )
    for name, (inputs, outputs) in features.items():
        problem = scaled_mm.size_problem(name, outputs, inputs, config.fp8_recipe)
        if problem is not None:
            raise ConfigError(
                f"{problem}; change the size, lower --tensor-model-parallel-size, or give another --fp8-recipe"
            )
    return Fp8Kernels(scaled_mm.ScaledMM(config.fp8_recipe), SEPARATE, "torch's scaled products")
