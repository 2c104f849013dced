"""The training rates to expect from types of GPU: computed from data sheets and assumed efficiencies, not measured.

    python -m benchmarks.gpu.expected

The model is part G's: 8 of the 32 layers of Llama-3 8B and a quarter of its vocabulary, sequences of 8192 tokens, a
step of 8 microbatches. The time is the sum of matrix products, attention, the memory traffic of the fused small
operations and of the optimizer, and LAUNCHES on top for gaps between kernels. Nothing overlaps.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

LAYERS, MICROBATCHES = 8, 8
TOKENS, HIDDEN, INNER, HEADS, GROUPS, HEAD, VOCABULARY = 8192, 4096, 14336, 32, 8, 128, 32064
LAUNCHES = 0.04
# Shares of a data sheet's figure that are assumed. Products: 720 TFLOP/s on Hopper, 670 with the result in fp32; blocks
# of FP8 lose more to their scales. Copies: 90 % for a plain copy, of which fused kernels reach 88 %.
PRODUCT, WEIGHT_GRADIENT, FP8_PRODUCT, COPY = 0.73, 0.68, 0.63, 0.79
# Bytes per element in bf16, forward and backward together; those of docs/fused_kernels.md.
NORM, RESIDUAL, GATED, ROTATION, LOGIT, PARAMETER = 10, 12, 16, 8, 6, 34
# FP8: an input or output gradient is read once, and written along both of its dimensions.
QUANTIZED = 4
# FP8: the product of a weight's gradient reads the fp32 sum that it adds to; the share of bf16 has that in it.
SUM = 4


class Gpu(NamedTuple):
    """A GPU. bf16, fp8: TFLOP/s of dense products, and memory: TB/s, in NVIDIA's data sheets. attention: shares of
    `bf16` that the published kernel reaches at 8192 tokens, forward and backward."""

    name: str
    bf16: float
    fp8: float | None
    memory: float
    attention: tuple[float, float]


# FlashAttention-2: arXiv 2307.08691, of A100. FlashAttention-3: 670 and 520 TFLOP/s on H100, see arXiv 2407.08608.
FLASH_2, FLASH_3 = (0.73, 0.63), (0.68, 0.53)
GPUS = (
    Gpu("A100 SXM 80 GB", 312.0, None, 2.04, FLASH_2),
    Gpu("H100 SXM", 989.0, 1979.0, 3.35, FLASH_3),
    Gpu("H200 SXM", 989.0, 1979.0, 4.80, FLASH_3),
)


def weights() -> int:
    """Returns the elements of the four matrices of a layer."""
    return HIDDEN * (HEADS + 2 * GROUPS) * HEAD + HEADS * HEAD * HIDDEN + 3 * HIDDEN * INNER


def attention_flops() -> float:
    """Returns the FLOPs of one forward of causal attention: half of the square."""
    return 2 * TOKENS**2 * HEADS * HEAD


def model_flops() -> float:
    """Returns the FLOPs of a step as training counts them: a backward is two forwards."""
    products = 6 * TOKENS * (LAYERS * weights() + HIDDEN * VOCABULARY)
    return MICROBATCHES * (products + 3 * LAYERS * attention_flops())


def step_seconds(gpu: Gpu, *, fp8: bool) -> float:
    """Returns the time of a step; with `fp8` the layers multiply in it, and the head in bf16."""
    half, peak = 1e12 * gpu.bf16, 1e12 * (gpu.fp8 or 0.0)
    bandwidth = 1e12 * gpu.memory * COPY

    def products(elements: int, *, fp8: bool) -> float:
        once = 2 * TOKENS * elements
        if fp8:
            return 3 * once / (peak * FP8_PRODUCT)
        return 2 * once / (half * PRODUCT) + once / (half * WEIGHT_GRADIENT)

    forward, backward = gpu.attention
    attended = attention_flops() * (1 / forward + 2.5 / backward) / half  # a backward computes the scores again
    small = TOKENS * (HIDDEN * (2 * NORM + 2 * RESIDUAL) + INNER * GATED + (HEADS + GROUPS) * HEAD * ROTATION)
    if fp8:
        inputs, gradients = 2 * HIDDEN + HEADS * HEAD + INNER, (HEADS + 2 * GROUPS) * HEAD + 2 * HIDDEN + 2 * INNER
        small += TOKENS * QUANTIZED * (inputs + gradients)
    layer = products(weights(), fp8=fp8) + attended + (small + (SUM * weights() if fp8 else 0)) / bandwidth
    head = products(HIDDEN * VOCABULARY, fp8=False) + (TOKENS * VOCABULARY * LOGIT + TOKENS * HIDDEN * NORM) / bandwidth
    update = PARAMETER * (LAYERS * weights() + 2 * HIDDEN * VOCABULARY) / bandwidth
    return (MICROBATCHES * (LAYERS * layer + head) + update) * (1 + LAUNCHES)


def table() -> str:
    """Returns the expected rates as a table."""
    lines = ["| GPU | bf16, ms per step | bf16, TFLOP/s | FP8, ms per step | FP8, TFLOP/s |", "|---|---|---|---|---|"]
    for gpu in GPUS:
        cells = []
        for fp8 in (False, True):
            seconds = step_seconds(gpu, fp8=fp8) if gpu.fp8 or not fp8 else None
            cells += (
                ["-", "-"] if seconds is None else [f"{1e3 * seconds:.0f}", f"{model_flops() / seconds / 1e12:.0f}"]
            )
        lines.append(f"| {gpu.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
