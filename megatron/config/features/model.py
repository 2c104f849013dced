"""The rows of the start-up table about layers, their kernels and their numerics."""

from __future__ import annotations

from megatron.config.features.feature import Facts, Feature, on_or_off
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig


def model_features(
    model: ModelConfig, optimizer: OptimizerConfig, length: int | None, facts: Facts, *, trains: bool
) -> list[Feature]:
    """Returns the rows about the model. `length` is the number of tokens of a sample, None if unknown."""
    return [
        _layers(model, facts),
        _attention(model, facts),
        _attention_window(model, length),
        _longrope(model, length),
        _dynamic_ntk(model, length),
        _products(model, facts),
        _expert_products(model, facts),
        _expert_kernels(model, facts),
        _fused(facts),
        _gradient_fusion(model, facts),
        _main_gradients(model, optimizer, facts),
        _dropout(model, trains=trains),
        _loss_scaling(model, optimizer),
    ]


def _layers(model: ModelConfig, facts: Facts) -> Feature:
    kernels, _, why = facts.layers_choice.partition(" (")
    return Feature("layers", model.transformer_impl, kernels, why.removesuffix(")"))


def _attention(model: ModelConfig, facts: Facts) -> Feature:
    kernel, _, why = facts.attention_choice.partition(" (")
    return Feature("attention kernel", model.attention_backend, kernel, why.removesuffix(")"))


def _attention_window(model: ModelConfig, longest: int | None) -> Feature:
    name, windows = "attention window", model.windows
    limited = [window for window in windows if window is not None]
    if not limited:
        return Feature(name, "off", "off", "")
    requested = f"{limited[0]} tokens, {len(limited)} of {len(windows)} layers"
    if longest is not None and longest <= limited[0]:
        return Feature(name, requested, "off", f"a sample of {longest} tokens fits in it")
    return Feature(name, requested, requested, "")


def _longrope(model: ModelConfig, length: int | None) -> Feature:
    name, original = "LongRoPE factors", model.rope_scaling_original_max_position_embeddings
    if model.position_embedding_type != "longrope" or length is None:
        return Feature(name, "off", "off", "")
    requested = f"short up to {original} tokens, long above"
    return Feature(name, requested, "long" if length > original else "short", f"samples have {length} tokens")


def _dynamic_ntk(model: ModelConfig, length: int | None) -> Feature:
    name, context = "dynamic NTK scaling", model.max_position_embeddings
    if model.dynamic_ntk_factor is None or length is None:
        return Feature(name, "off", "off", "")
    requested = f"{model.dynamic_ntk_factor:g} above {context or length} tokens"
    is_long = context is not None and length > context
    return Feature(name, requested, requested if is_long else "off", f"samples have {length} tokens")


def _products(model: ModelConfig, facts: Facts) -> Feature:
    dtype = model.dtype_name
    if facts.upcast_products:
        return Feature("matrix products", dtype, "float32", f"this {facts.device.upper()} has no fast {dtype} products")
    return Feature("matrix products", dtype, dtype, "")


def _expert_products(model: ModelConfig, facts: Facts) -> Feature:
    name, missing = "products of experts", facts.grouped_missing
    if model.num_experts is None:
        return Feature(name, "off", "off", "")
    return Feature(name, "grouped", "grouped" if missing is None else "one per expert", missing or "")


def _expert_kernels(model: ModelConfig, facts: Facts) -> Feature:
    name = "fused kernels of experts"
    if model.num_experts is None:
        return Feature(name, "off", "off", "")
    names, _, why = facts.experts_choice.partition(" (")
    return Feature(name, "auto", names, why.removesuffix(")"))


def _fused(facts: Facts) -> Feature:
    names, _, why = facts.fused_choice.partition(" (")
    return Feature("fused kernels", "auto", names, why.removesuffix(")"))


def _gradient_fusion(model: ModelConfig, facts: Facts) -> Feature:
    requested = model.gradient_accumulation_fusion
    works = facts.fusion_missing is None
    return Feature(
        "gradient accumulation fusion",
        on_or_off(requested),
        on_or_off(works),
        facts.fusion_missing or "" if requested else "",
    )


def _main_gradients(model: ModelConfig, optimizer: OptimizerConfig, facts: Facts) -> Feature:
    if optimizer.main_grads_dtype != "fp32":
        return Feature("fp32 main gradients", "off", "off", "kept in bf16, every sum rounded at random")
    if facts.separate_main_grads:
        return Feature("fp32 main gradients", "auto", "on", f"parameters are {model.dtype_name}")
    return Feature("fp32 main gradients", "auto", "off", "parameters are fp32 themselves")


def _dropout(model: ModelConfig, *, trains: bool) -> Feature:
    rates = model.attention_dropout, model.hidden_dropout
    requested = "attention {:g}, hidden {:g}".format(*rates) if any(rates) else "off"
    if not trains and any(rates):
        return Feature("dropout", requested, "off", "evaluation only")
    return Feature("dropout", requested, requested, "")


def _loss_scaling(model: ModelConfig, optimizer: OptimizerConfig) -> Feature:
    if not model.fp16:
        return Feature("loss scaling", "auto", "off", f"{model.dtype_name} needs none")
    fixed = optimizer.loss_scale
    if fixed is not None:
        return Feature("loss scaling", f"fixed {fixed:g}", f"fixed {fixed:g}", "")
    return Feature("loss scaling", "auto", f"dynamic from {optimizer.initial_loss_scale:g}", "float16")
