"""The rows of the start-up table about FP8 products."""

from __future__ import annotations

from megatron.config.features.feature import Facts, Feature
from megatron.config.fp8 import MAX, MXFP8, Fp8Config
from megatron.config.model import ModelConfig

NONE = "none"  # the kernel of products that are not in FP8


def fp8_features(fp8: Fp8Config, model: ModelConfig, facts: Facts) -> list[Feature]:
    """Returns the rows of a run with FP8 products; of one without them none."""
    if not fp8.enabled:
        return []
    return [
        _products(fp8, model, facts),
        _scales(fp8),
        _weight_gradients(fp8, model),
        *([] if model.num_experts is None else [_experts(model, facts)]),
    ]


def _products(fp8: Fp8Config, model: ModelConfig, facts: Facts) -> Feature:
    assert model.num_layers
    kernel, _, why = facts.fp8_choice.partition(" (")
    requested = f"{fp8.fp8_format}, {fp8.fp8_recipe}"
    layers = len(fp8.layers(model.num_layers))
    return Feature(
        "FP8 products",
        requested,
        f"{kernel}: {layers} of {model.num_layers} layers, not the head",
        why.removesuffix(")"),
    )


def _scales(fp8: Fp8Config) -> Feature:
    name = "FP8 scales"
    if not fp8.is_delayed:
        kind = "of 32 values" if fp8.fp8_recipe == MXFP8 else "of the present values"
        return Feature(name, fp8.fp8_recipe, kind, "")
    length = fp8.fp8_amax_history_len if fp8.fp8_amax_compute_algo == MAX else 1
    requested = f"{fp8.fp8_amax_compute_algo} of {fp8.fp8_amax_history_len} steps, margin {fp8.fp8_margin}"
    steps = "the last step" if length == 1 else f"the last {length} steps"
    return Feature(name, requested, f"for the largest values of {steps}, margin {fp8.fp8_margin}", "")


def _weight_gradients(fp8: Fp8Config, model: ModelConfig) -> Feature:
    name = "weight gradients of FP8 layers"
    if fp8.fp8_wgrad:
        return Feature(name, "FP8", "FP8", "")
    return Feature(name, model.dtype_name, model.dtype_name, "--no-fp8-wgrad")


def _experts(model: ModelConfig, facts: Facts) -> Feature:
    kernel, _, why = facts.fp8_experts_choice.partition(" (")
    reasons = [why.removesuffix(")")] if why else []
    if kernel == NONE:
        kernel = model.dtype_name
    else:
        kernel += f", but for weight gradients: {model.dtype_name}"
        reasons.append("the rows of an expert do not end with a block")
    return Feature("FP8 products of experts", "FP8", kernel, "; ".join(reasons))
