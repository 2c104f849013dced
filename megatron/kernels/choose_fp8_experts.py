"""The kernel of the experts' products in FP8: chosen once during set-up, for all layers with experts."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.config.features.fp8 import NONE
from megatron.config.fp8 import Fp8Config
from megatron.config.model import ModelConfig
from megatron.kernels import fused
from megatron.kernels.choose_fp8 import unit_operands
from megatron.kernels.ops.assignments import Assignments, Picked
from megatron.kernels.ops.fp8.formats import FORMATS
from megatron.kernels.ops.fp8.grouped import ExpertStack, Fp8Grouped, GroupedProduct, emulated
from megatron.kernels.ops.fp8.quantize import Quantized
from megatron.spec.fp8_sizes import experts_problem

_SIZES = [130, 0, 3, 70]  # rows of the experts of a trial: more than a tile, none, less than one
_OUT, _IN = 256, 384


class Fp8Experts(NamedTuple):
    """product: None where experts are not in FP8. choice: "kernel (why not a better one)", for the start-up table."""

    product: GroupedProduct | None
    choice: str


def choose_fp8_experts(config: Fp8Config, model: ModelConfig, etp: int, device: torch.device) -> Fp8Experts:
    """Returns the kernel for this device. etp: ranks that share an expert.

    On a CPU the products are emulated. Where no kernel runs, experts stay in the dtype of the parameters.
    """
    if model.num_experts is None:
        return Fp8Experts(None, "")
    assert model.hidden_size
    on_cpu = device.type != "cuda"
    missing = experts_problem(config.fp8_recipe, model.hidden_size, model.moe_ffn_dim // etp, cpu=on_cpu)
    if missing is None and on_cpu:
        return Fp8Experts(emulated, f"emulated in fp32 (the device is {device.type})")
    if missing is None and fused.only_traced():
        return Fp8Experts(_traced, "grouped products in Triton (not tried: the run is only traced)")
    missing = missing or fused.missing(device)
    if missing is not None:
        return Fp8Experts(None, f"{NONE} ({missing})")
    kernel = load()
    failure = fused.failure_of(lambda: _try(kernel, config, device))
    return (
        Fp8Experts(kernel, "grouped products in Triton") if failure is None else Fp8Experts(None, f"{NONE} ({failure})")
    )


def load() -> GroupedProduct:
    """Returns the kernel in Triton, which is imported here."""
    kernel: GroupedProduct = importlib.import_module("megatron.kernels.backends.triton.grouped_fp8").multiply
    return kernel


def _traced(a: Quantized, picked: Tensor | None, b: ExpertStack, out: Tensor, assignments: Assignments) -> None:
    """Stands for the kernel in a --dry-run: it takes no memory besides its operands and its result."""


def _try(kernel: GroupedProduct, config: Fp8Config, device: torch.device) -> None:
    """Raises an error if the kernel cannot run, or its products are not close to the emulation."""
    assert config.fp8_format is not None
    rows = torch.arange(sum(_SIZES), device=device) // 2
    assignments = Assignments(rows, torch.tensor(_SIZES, device=device).cumsum(0).int(), _SIZES)
    values, grads = (
        fused.numbers(device, torch.bfloat16, sum(_SIZES), width, turns=turns)
        for width, turns in ((_IN, 0.7), (_OUT, 1.1))
    )
    weight = fused.numbers(device, torch.bfloat16, len(_SIZES), _OUT, _IN, turns=1.3)
    results: list[tuple[Tensor, ...]] = []
    for product in (kernel, emulated):
        operands = unit_operands(config.fp8_recipe, FORMATS[config.fp8_format], device)
        layer = Fp8Grouped(operands, product, keep_weight=True)
        output = layer.output(Picked(values, None), weight, assignments)
        results.append((output, layer.input_grad(Picked(grads, rows), weight, assignments)))
    fused.compare(*results)
