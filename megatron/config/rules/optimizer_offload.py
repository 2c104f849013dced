"""Rules about the placement and the dtypes of optimizer state. See rules/model.py for the form of a rule."""

from __future__ import annotations

from megatron.config.optimizer_offload import updates_on_cpu
from megatron.config.run import RunConfig

_ALIGN = 64  # elements: chunks begin at boundaries of vectors and of rows of the gradient's norm


def one_optimizer_offload(run: RunConfig, world_size: int) -> str | None:
    """Either the CPU updates offloaded state, or the device does."""
    if run.optimizer_offload.offload_optimizer_states and updates_on_cpu(run.optimizer, run.optimizer_offload):
        asked = "--optimizer hybridadam" if run.optimizer.optimizer == "hybridadam" else "--optimizer-cpu-offload"
        return f"{asked} updates on the CPU and --offload-optimizer-states on the device; remove one of them"
    return None


def cpu_offload_is_adam(run: RunConfig, world_size: int) -> str | None:
    """The CPU's kernel implements adam only."""
    if run.optimizer_offload.optimizer_cpu_offload and run.optimizer.rule != "adam":
        return (
            f"--optimizer-cpu-offload updates with adam, and --optimizer is {run.optimizer.optimizer}; give --optimizer "
            "adam, or --offload-optimizer-states instead"
        )
    return None


def chunks_are_aligned(run: RunConfig, world_size: int) -> str | None:
    """A chunk is a whole number of rows of 64 elements."""
    size = run.optimizer_offload.optimizer_offload_chunk_size
    if size % _ALIGN:
        near = max(_ALIGN, size // _ALIGN * _ALIGN)
        return f"--optimizer-offload-chunk-size {size} is not a multiple of {_ALIGN}; give {near}"
    return None


def low_precision_state_is_allowed(run: RunConfig, world_size: int) -> str | None:
    """As in Megatron-LM one flag allows bf16 state, and others select it; only adam supports it."""
    o = run.optimizer
    asked = [name for name, dtype in _dtypes(run) if dtype != "fp32"]
    if asked and not o.use_precision_aware_optimizer:
        return f"{asked[0]} bf16 needs --use-precision-aware-optimizer; add it"
    if o.use_precision_aware_optimizer and o.rule != "adam":
        return f"--use-precision-aware-optimizer is for adam, and --optimizer is {o.optimizer}; remove one of them"
    return None


def remainders_have_weights(run: RunConfig, world_size: int) -> str | None:
    """A remainder completes a bf16 weight on the same device."""
    if run.optimizer.main_params_dtype == "fp32":
        return None
    if not run.model.bf16:
        return (
            "--main-params-dtype bf16 completes bf16 weights to fp32 masters, and the weights are "
            f"{run.model.dtype_name}; add --bf16, or remove it"
        )
    if updates_on_cpu(run.optimizer, run.optimizer_offload):
        return (
            "--main-params-dtype bf16 needs the weights with them, and the CPU updates masters in host memory, where they "
            "are fp32; remove it, or give --offload-optimizer-states instead of offloaded updates"
        )
    return None


def _dtypes(run: RunConfig) -> list[tuple[str, str]]:
    o = run.optimizer
    return [
        ("--exp-avg-dtype", o.exp_avg_dtype),
        ("--exp-avg-sq-dtype", o.exp_avg_sq_dtype),
        ("--main-params-dtype", o.main_params_dtype),
    ]


RULES = (
    one_optimizer_offload,
    cpu_offload_is_adam,
    chunks_are_aligned,
    low_precision_state_is_allowed,
    remainders_have_weights,
)
