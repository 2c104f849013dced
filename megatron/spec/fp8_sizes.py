"""Bytes of quantized operands of FP8 products."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.config.fp8 import BLOCKWISE, MXFP8, Fp8Config
from megatron.spec.expert_rows import ExpertRows
from megatron.spec.linear import LinearSpec
from megatron.spec.moe import ExpertsSpec

FP8, FP32 = 1, 4  # bytes per element
# Elements per factor of activations and gradients, and of weights; and the bytes of a factor.
_FACTORS = {BLOCKWISE: (128, 128 * 128, FP32), MXFP8: (32, 32, 1)}
_BLOCK, _ALIGNMENT = 128, 16  # of the sizes of experts


@dataclass(frozen=True)
class Fp8Sizes:
    """The FP8 products of linear layers, and of experts unless `experts_problem` has a reason.

    layers: the numbers of the layers with FP8 products. keeps_weights: quantized weights are kept from their first use
    in a step to its end. weight_grads: the products of weight gradients are in FP8, too. accumulates: a step has
    several microbatches, so that most of these products are added to a sum.
    """

    recipe: str
    layers: range
    keeps_weights: bool
    weight_grads: bool
    accumulates: bool

    @property
    def blocks(self) -> bool:
        """Whether parts of an operand have factors of their own."""
        return self.recipe in _FACTORS

    def operand(self, elements: int) -> int:
        """Bytes of an activation or gradient, quantized in one direction, and its factors."""
        per, _, width = _FACTORS.get(self.recipe, (elements, elements, 0))
        return FP8 * elements + width * elements // per

    def weight(self, elements: int) -> int:
        """Bytes of a weight, quantized in one direction, and its factors."""
        _, per, width = _FACTORS.get(self.recipe, (elements, elements, 0))
        return FP8 * elements + width * elements // per


def fp8_sizes(fp8: Fp8Config, layers: int, *, keeps_weights: bool, microbatches: int) -> Fp8Sizes | None:
    """Returns the sizes of the FP8 layers of a model with so many layers; None if there are none."""
    if not fp8.enabled:
        return None
    return Fp8Sizes(fp8.fp8_recipe, fp8.layers(layers), keeps_weights, fp8.fp8_wgrad, microbatches > 1)


def kept_weight(linear: LinearSpec, tp: int, fp8: Fp8Sizes) -> int:
    """Bytes of a rank's quantized weight that are kept during a step: both directions."""
    inputs, outputs = linear.local_features(tp)
    return 2 * fp8.weight(inputs * outputs) if fp8.keeps_weights else 0


def experts_problem(recipe: str, hidden: int, width: int, *, cpu: bool) -> str | None:
    """Returns why products of experts, of this width on a rank, are not in FP8 as those of linear layers are; or
    None."""
    if recipe == MXFP8:
        return "there are no grouped products with mxfp8 scales"
    multiple = _BLOCK if recipe == BLOCKWISE else _ALIGNMENT
    if cpu or hidden % multiple == width % multiple == 0:
        return None
    return f"hidden size {hidden} and width {width} of a rank's experts are no multiples of {multiple}"


def kept_experts(spec: ExpertsSpec, load: ExpertRows, fp8: Fp8Sizes, *, cpu: bool) -> int:
    """Returns the bytes of the quantized weights that a step keeps of one layer's experts on this rank."""
    if not fp8.keeps_weights or experts_problem(fp8.recipe, spec.hidden, spec.width // load.etp, cpu=cpu) is not None:
        return 0
    shards = spec.experts // load.experts * load.etp
    return 2 * sum(fp8.weight(math.prod(weight.shape) // shards) for weight in (spec.linear_fc1, spec.linear_fc2))
