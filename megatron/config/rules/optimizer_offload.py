"""Rules about the placement and the dtypes of optimizer state."""

from __future__ import annotations

from functools import partial

from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.optimizer_offload import OptimizerOffloadConfig, updates_on_cpu
from megatron.config.rules.rule import ConfigRule
from megatron.config.run import RunConfig
from megatron.config.update_rules import HYBRID, rules_that

_ALIGN = 64  # elements: chunks begin at boundaries of vectors and of rows of the gradient's norm


def one_optimizer_offload(optimizer_offload: OptimizerOffloadConfig, optimizer: OptimizerConfig) -> str | None:
    """Either the CPU updates offloaded state, or the device does."""
    if optimizer_offload.offload_optimizer_states and updates_on_cpu(optimizer, optimizer_offload):
        flag = "--optimizer hybridadam" if optimizer.optimizer == HYBRID else "--optimizer-cpu-offload"
        return f"{flag} updates on the CPU and --offload-optimizer-states on the device; remove one of them"
    return None


def cpu_offload_is_adam(optimizer_offload: OptimizerOffloadConfig, optimizer: OptimizerConfig) -> str | None:
    """The CPU has kernels for some rules only."""
    if optimizer_offload.optimizer_cpu_offload and not optimizer.rule_spec.updates_on_cpu:
        names = rules_that(update_on_cpu=True)
        return (
            f"--optimizer-cpu-offload updates with {names}, and --optimizer is {optimizer.optimizer}; give --optimizer "
            f"{names}, or --offload-optimizer-states instead"
        )
    return None


def chunks_are_aligned(optimizer_offload: OptimizerOffloadConfig) -> str | None:
    """A chunk is a whole number of rows of 64 elements."""
    size = optimizer_offload.optimizer_offload_chunk_size
    if size % _ALIGN:
        near = max(_ALIGN, size // _ALIGN * _ALIGN)
        return f"--optimizer-offload-chunk-size {size} is not a multiple of {_ALIGN}; give {near}"
    return None


def low_precision_state_is_allowed(optimizer: OptimizerConfig) -> str | None:
    """As in Megatron-LM one flag allows bf16 state, and others select it, for rules whose state has dtypes."""
    flags = [name for name, dtype in _dtypes(optimizer) if dtype != "fp32"]
    if flags and not optimizer.use_precision_aware_optimizer:
        return f"{flags[0]} bf16 needs --use-precision-aware-optimizer; add it"
    if optimizer.use_precision_aware_optimizer and not optimizer.rule_spec.has_dtypes:
        return (
            f"--use-precision-aware-optimizer is for {rules_that(have_dtypes=True)}, and --optimizer is "
            f"{optimizer.optimizer}; remove one of them"
        )
    return None


def remainders_have_weights(
    optimizer: OptimizerConfig, model: ModelConfig, optimizer_offload: OptimizerOffloadConfig
) -> str | None:
    """A remainder completes a bf16 weight on the same device."""
    if optimizer.main_params_dtype == "fp32":
        return None
    if not model.bf16:
        return (
            "--main-params-dtype bf16 completes bf16 weights to fp32 masters, and the weights are "
            f"{model.dtype_name}; give --bf16{' instead of --fp16' if model.fp16 else ''}, or leave it out"
        )
    if updates_on_cpu(optimizer, optimizer_offload):
        return (
            "--main-params-dtype bf16 needs the weights with them, and the CPU updates masters in host memory, where "
            "they are fp32; leave it out, or give --offload-optimizer-states instead of --optimizer-cpu-offload"
        )
    return None


def _dtypes(optimizer: OptimizerConfig) -> list[tuple[str, str]]:
    return [
        ("--main-grads-dtype", optimizer.main_grads_dtype),
        ("--exp-avg-dtype", optimizer.exp_avg_dtype),
        ("--exp-avg-sq-dtype", optimizer.exp_avg_sq_dtype),
        ("--main-params-dtype", optimizer.main_params_dtype),
    ]


def rules(run: RunConfig) -> list[ConfigRule]:
    """Returns the rules about the placement and the dtypes of optimizer state."""
    return [
        partial(one_optimizer_offload, run.optimizer_offload, run.optimizer),
        partial(cpu_offload_is_adam, run.optimizer_offload, run.optimizer),
        partial(chunks_are_aligned, run.optimizer_offload),
        partial(low_precision_state_is_allowed, run.optimizer),
        partial(remainders_have_weights, run.optimizer, run.model, run.optimizer_offload),
    ]
