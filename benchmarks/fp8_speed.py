"""Times of FP8 on a GPU: quantization, and gradients of weights that are added to their sums.

    python -m benchmarks.fp8_speed

The matrices are those of a layer of Llama-3 8B with 8192 tokens. Times are medians, with a cold cache. GB/s counts what a
kernel has to read and write once. The columns of sums are TFLOP/s: of the product alone, which writes fp32; of the product
and an addition; of cuBLASLt's product that adds; and of the product in bf16 that adds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.triton_quantize import quantize_calls
from megatron.config.fp8 import Fp8Config
from megatron.kernels.choose_fp8 import choose_sums
from megatron.kernels.choose_quantize import choose_quantize
from megatron.kernels.ops import weight_grad
from megatron.kernels.ops.fp8.formats import FORMATS
from megatron.kernels.ops.fp8.operands import Operands, blockwise, tensorwise
from megatron.kernels.ops.fp8.scaled_mm import AddProduct, ScaledMM

TOKENS, HIDDEN = 8192, 4096
WEIGHTS = {"qkv": (6144, 4096), "proj": (4096, 4096), "fc1": (28672, 4096), "fc2": (4096, 14336)}
BYTES = {"amaxes": 2, "rows": 3, "columns": 3, "both": 4}  # per element, by the last word of a call's name


def main() -> None:
    """Prints both tables."""
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}\n")
    print_quantization(device)
    print_sums(device)


def print_quantization(device: torch.device) -> None:
    """Prints a row for each kernel and direction."""
    print("| quantization | ms | GB/s |\n|---|---|---|")
    for name, call in quantize_calls(TOKENS, HIDDEN, str(device)).items():
        ms = _milliseconds(call)
        moved = BYTES[name.split()[-1]] * TOKENS * HIDDEN
        print(f"| {name} | {ms:.3f} | {moved / ms / 1e6:.0f} |")


def print_sums(device: torch.device) -> None:
    """Prints a row for each recipe and weight."""
    kernels, _ = choose_quantize(device)
    print("\n| recipe | weight | product | product, addition | cuBLASLt | bf16 |\n|---|---|---|---|---|---|")
    for recipe, operands in (("blockwise", blockwise), ("tensorwise", tensorwise)):
        add, why = choose_sums(Fp8Config(fp8_format="hybrid", fp8_recipe=recipe), device)
        if why is not None:
            print(f"{recipe}: not by cuBLASLt: {why}")
        for name, (out, into) in WEIGHTS.items():
            x, grad = (torch.randn(TOKENS, width, device=device).bfloat16() for width in (into, out))
            calls = sums_of(ScaledMM(recipe), add, operands(FORMATS["hybrid"], kernels=kernels), x, grad)
            rates = (
                "-" if call is None else f"{2e-9 * TOKENS * out * into / _milliseconds(call):.0f}" for call in calls
            )
            print(f"| {recipe} | {name} | {' | '.join(rates)} |")


def sums_of(
    product: ScaledMM, add: AddProduct | None, of: Operands, x: Tensor, grad: Tensor
) -> list[Callable[[], object] | None]:
    """Returns the calls of a row, for x [tokens, in] and grad [tokens, out]."""
    columns = [operand(y, rows=False, columns=True).columns for operand, y in ((of.gradient, grad), (of.input, x))]
    a, b = (product.ready(each) for each in columns if each is not None)
    sums = torch.zeros(grad.shape[1], x.shape[1], device=x.device)
    return [
        partial(product, a, b, sums, fast=False),
        partial(product.add, a, b, sums),
        None if add is None else partial(add, sums, a, b),
        partial(weight_grad.fused_mixed, sums, grad, x, False),
    ]


def _milliseconds(call: Callable[[], object]) -> float:
    return float(importlib.import_module("triton.testing").do_bench(call, return_mode="median"))


if __name__ == "__main__":
    main()
