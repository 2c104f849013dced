"""Chooses the kernels of --transformer-impl transformer_engine: those of NVIDIA's Transformer Engine that can run.

Only its kernels are taken, behind the interfaces of our own. Parameters, communication, recompute and offload stay with
our layers, so everything works with them as it does without. Each kernel is tried on a few tokens; one that fails, or
for which the package has nothing, leaves its place to our own, and the start-up table says so. The package itself was
asked for by name: without it, a run on CUDA stops. So does one whose child process (child_trial.py) does not survive
these kernels. A CPU runs our own kernels, so the command line of a cluster runs on a laptop.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from megatron.base.cuda_environment import set_cudnn
from megatron.base.errors import ConfigError, first_line
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.kernels.child_trial import failure_in_child
from megatron.kernels.fused import (
    SEPARATE,
    LayerKernels,
    choose_fused,
    compare,
    failure_of,
    no_fused_gate,
    numbers,
    only_traced,
    try_norm,
)
from megatron.kernels.ops import attention as own_attention
from megatron.kernels.ops import weight_grad
from megatron.kernels.ops.activation import Activation
from megatron.kernels.ops.attention import AttentionKernel
from megatron.kernels.ops.fp8.linear import QuantizingKernel
from megatron.kernels.ops.linear import LinearKernel, OutputGrad, new_weight_grad
from megatron.kernels.ops.norm import NormKernel, ResidualNorm
from megatron.kernels.ops.weight_grad import WeightGrad
from megatron.spec.mlp import GEGLU_TANH, GELU_TANH, SQUARED_RELU, SWIGLU, activation_of

OLDEST = (2, 12)  # its functions have the arguments that are passed here
_ENGINE, _PACKAGE = "transformer_engine", "transformer_engine"


class EngineFp8(NamedTuple):
    """FP8 products: see backends/transformer_engine/fp8.py."""

    layer: Callable[..., QuantizingKernel]
    why_not: Callable[[str], str | None]


class Engine(NamedTuple):
    """The kernels of Transformer Engine. attention: with another kernel for what it cannot do; activations: by name."""

    version: str
    linear: Callable[[WeightGrad], LinearKernel]
    weight_grad: WeightGrad
    norm: NormKernel
    activations: Mapping[str, Activation]
    attention: AttentionKernel
    attention_alone: AttentionKernel  # raises for what it cannot do
    fp8: EngineFp8


def find_engine(impl: str, device: torch.device, in_child: partial[None] | None = None) -> tuple[Engine | None, str]:
    """Returns the kernels for `--transformer-impl impl`, or None and the reason, which is "" if they are not asked for.

    in_child: this run's trials of the package, which a child process runs before this process loads it. Raises
    ConfigError if the kernels are asked for and a GPU could run them, but the package is missing, too old or broken, or
    ends the child.
    """
    if impl != _ENGINE:
        return None, ""
    if device.type != "cuda":
        return None, f"Transformer Engine needs CUDA, the device is {device.type}"
    if only_traced():
        return None, "the run is only traced"
    try:
        version = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise _refusal(f"{_PACKAGE} is not installed") from None
    oldest = ".".join(map(str, OLDEST))
    if _release(version) < OLDEST:
        raise _refusal(f"{_PACKAGE} {version} is installed, version {oldest} is the oldest that works")
    set_cudnn(os.environ)
    failure = None if in_child is None else failure_in_child(in_child, device, _PACKAGE)
    if failure is not None:
        raise _refusal(f"{_PACKAGE} {version}: {failure}")
    try:
        importlib.import_module("transformer_engine.pytorch")
        return load(version), ""
    except Exception as error:  # it is built for another torch or another CUDA, or has lost or renamed a function
        raise _refusal(f"{_PACKAGE} {version} cannot be loaded: {first_line(error)}") from None


def load(version: str) -> Engine:
    """Returns the kernels of the package, which is imported here."""
    name = "megatron.kernels.backends.transformer_engine"
    linear, norm, activation, attention, fp8 = (
        importlib.import_module(f"{name}.{module}") for module in ("linear", "norm", "activation", "attention", "fp8")
    )
    return Engine(
        version,
        linear.EngineLinear,
        linear.weight_grad,
        NormKernel(
            norm.compute_rms_norm,
            norm.gradient_rms_norm,
            norm.compute_layer_norm,
            norm.gradient_layer_norm,
            ResidualNorm(norm.compute_add_norm, norm.gradient_add_norm),
        ),
        {operation: getattr(activation, operation) for operation in (SWIGLU, GEGLU_TANH, GELU_TANH, SQUARED_RELU)},
        attention.attention(own_attention.fused),
        attention.attention(attention.no_kernel),
        EngineFp8(fp8.layer, fp8.why_not),
    )


class Layers(NamedTuple):
    """The kernels of layers but attention's, and the words about them for the start-up table."""

    linear: LinearKernel
    fused: LayerKernels
    choice: str
    fused_choice: str


def choose_layers(
    engine: Engine | None,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    plain: LinearKernel,
    optimizer: OptimizerConfig | None = None,
    *,
    blocks: bool = False,
) -> Layers:
    """Returns the engine's kernels, and our own where it has none that works. plain: our own products. optimizer,
    blocks: see choose_fused."""
    if engine is None:
        fused, fused_choice = choose_fused(config, device, dtype, optimizer, blocks=blocks)
        return Layers(plain, fused, "local", fused_choice)
    name, (linear, reasons) = activation_of(config), try_layers(engine, config, device, dtype, plain)
    taken = [field for field, of in (("norm", "norms"), ("activations", name)) if reasons[of] is None]
    fused, fused_choice = choose_fused(config, device, dtype, optimizer, taken, blocks=blocks)
    if "norm" in taken:
        fused = fused._replace(norm=engine.norm)
    if "activations" in taken:
        fused = fused._replace(activations={**fused.activations, name: engine.activations[name]})
    return Layers(linear, fused, _describe(engine, reasons), fused_choice)


def try_layers(
    engine: Engine, config: ModelConfig, device: torch.device, dtype: torch.dtype, plain: LinearKernel
) -> tuple[LinearKernel, dict[str, str | None]]:
    """Returns the products of linear layers, the engine's or `plain`, and of each kernel why it is not taken, or
    None."""
    linear, no_products = _choose_linear(engine, config, device, dtype, plain)
    name = activation_of(config)
    return linear, {
        "matrix products": no_products,
        "norms": _no_norms(engine, config, device, dtype),
        name: _no_activation(engine, config, device, dtype, name),
    }


def _choose_linear(
    engine: Engine, config: ModelConfig, device: torch.device, dtype: torch.dtype, plain: LinearKernel
) -> tuple[LinearKernel, str | None]:
    """Returns the products of linear layers, or `plain` and the reason."""
    if dtype == torch.float32:
        return plain, "it multiplies fp32 in TF32"
    of_weights = engine.weight_grad if config.gradient_accumulation_fusion else weight_grad.separate
    kernel = engine.linear(of_weights)
    failure = failure_of(partial(_try_linear, kernel, plain, device, dtype))
    return (kernel, None) if failure is None else (plain, failure)


def _no_norms(engine: Engine, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns the reason why the engine's norms are not taken, or None."""
    if not config.persist_layer_norm:
        return "--no-persist-layer-norm"
    return failure_of(partial(try_norm, engine.norm, config, device, dtype))


def _no_activation(
    engine: Engine, config: ModelConfig, device: torch.device, dtype: torch.dtype, name: str
) -> str | None:
    """Returns the reason why the engine's activation is not taken, or None."""
    reason = no_fused_gate(config) if config.gated else None
    if reason is not None:
        return reason
    if name not in engine.activations:
        return "it has none"
    return failure_of(partial(_try_activation, engine.activations[name], SEPARATE.activations[name], device, dtype))


def _describe(engine: Engine, reasons: Mapping[str, str | None]) -> str:
    """Returns "Transformer Engine VERSION: kernels in use (reasons for the others)"."""
    used = [name for name, reason in reasons.items() if reason is None]
    refusals = [f"{name} not: {reason}" for name, reason in reasons.items() if reason is not None]
    words = f"Transformer Engine {engine.version}: {', '.join(used) or 'none'}"
    return f"{words} ({'; '.join(refusals)})" if refusals else words


def _refusal(reason: str) -> ConfigError:
    oldest = ".".join(map(str, OLDEST))
    return ConfigError(
        f"--transformer-impl transformer_engine cannot run here: {reason}; install transformer_engine[pytorch] "
        f"{oldest} or newer for this torch, or give --transformer-impl local"
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _try_linear(kernel: LinearKernel, plain: LinearKernel, device: torch.device, dtype: torch.dtype) -> None:
    x, grad = numbers(device, dtype, 48, 2, 64), numbers(device, dtype, 48, 2, 32, turns=1.1)
    weight, bias = numbers(device, dtype, 32, 64, turns=0.3), numbers(device, dtype, 32)
    results = []
    for linear in (kernel, plain):
        prepared = linear.prepare(grad, for_weight=True)
        main_grad = torch.ones(32, 64, device=device)
        linear.weight_grad(main_grad, prepared, x, False)
        results.append(
            (
                linear.output(x, weight),
                linear.output(x, weight, bias),
                linear.input_grad(prepared, weight),
                main_grad,
                new_weight_grad(linear, weight, OutputGrad(grad), x),
            )
        )
    compare(*results)


def _try_activation(kernel: Activation, plain: Activation, device: torch.device, dtype: torch.dtype) -> None:
    x = numbers(device, dtype, 64, 256)
    expected = plain.compute(x)[0]
    grad = numbers(device, dtype, *expected.shape, turns=1.1)
    compare((kernel.compute(x)[0], kernel.gradient_of_input(grad, x)), (expected, plain.gradient_of_input(grad, x)))
