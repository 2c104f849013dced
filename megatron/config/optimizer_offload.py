"""Flags about the placement and the update of the optimizer's state, and the settings that they imply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.flag import Need, flag
from megatron.config.interval import COUNT, COUNT_OR_NONE, FRACTION
from megatron.config.optimizer import OptimizerConfig
from megatron.config.update_rules import HYBRID

OFF, UPDATE, STATES = "off", "update", "states"
_MIB = 1024**2


def _offloads(run: Any) -> bool:
    """Whether the optimizer is offloaded, activations or weights are, or the balanced policy may offload some."""
    activations = run.activation_offload.kind is not None or run.recompute.recompute_policy == "balanced"
    return activations or run.activation_offload.cpu_offloading_weights or _offloads_optimizer(run)


def _offloads_optimizer(run: Any) -> bool:
    return offload_settings(run.optimizer, run.optimizer_offload).mode != OFF


def _updates_on_cpu(run: Any, policy: str | None = None) -> bool:
    """Whether the CPU updates, and by this policy if one is given."""
    configs = run.optimizer, run.optimizer_offload
    return updates_on_cpu(*configs) and (policy is None or policy_of(*configs) == policy)


@dataclass(frozen=True, kw_only=True)
class OptimizerOffloadConfig:
    """Offload of masters and moments."""

    optimizer_cpu_offload: bool = flag(
        False, "keep masters and moments of a part of the model in host memory, where the CPU updates them"
    )
    optimizer_offload_policy: str | None = flag(
        None,
        "part to offload: static is --optimizer-offload-fraction of it; auto is the part that does not fit, measured "
        "and adapted during the run; default static, and auto with --optimizer hybridadam",
        choices=("static", "auto"),
        needs=Need(lambda run: _updates_on_cpu(run), "the device updates everything", "add --optimizer-cpu-offload"),
    )
    optimizer_offload_fraction: float = flag(
        1.0,
        "fraction of the elements that --optimizer-offload-policy static offloads",
        within=FRACTION,
        needs=Need(
            lambda run: _updates_on_cpu(run, "static"),
            lambda run: (
                "--optimizer-offload-policy is auto" if _updates_on_cpu(run) else "the device updates everything"
            ),
            "give --optimizer-cpu-offload and --optimizer-offload-policy static",
        ),
    )
    optimizer_offload_chunk_size: int = flag(
        4 * _MIB,
        "elements of a chunk, the unit that is placed and copied; a multiple of 64, best a power of two",
        within=COUNT,
        needs=Need(
            lambda run: _offloads_optimizer(run) or run.optimizer.has_bf16_state,
            "nothing is cut into chunks",
            "add --optimizer-cpu-offload or --offload-optimizer-states",
        ),
    )
    optimizer_offload_auto_threshold: int = flag(
        2 * 1024 * _MIB,
        "bytes of device memory that --optimizer-offload-policy auto keeps free; chunks return if twice as much would "
        "stay free",
        within=COUNT_OR_NONE,
        needs=Need(
            lambda run: _updates_on_cpu(run, "auto"),
            lambda run: (
                "--optimizer-offload-policy is static" if _updates_on_cpu(run) else "the device updates everything"
            ),
            "give --optimizer-cpu-offload and --optimizer-offload-policy auto",
        ),
    )
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False,
        "overlap copies of gradients with backward, and the update with the next forward until it reads a parameter",
        needs=Need(
            lambda run: _updates_on_cpu(run) and _offloads_optimizer(run),
            lambda run: (
                "--optimizer-offload-fraction is 0" if _updates_on_cpu(run) else "the device updates everything"
            ),
            "give --optimizer-cpu-offload with a fraction above 0",
        ),
    )
    offload_optimizer_states: bool = flag(
        False, "keep masters and moments in host memory between steps; the device updates them, chunk by chunk"
    )
    offload_dir: str | None = flag(
        None,
        "offload to files in this folder instead of host memory",
        needs=Need(lambda run: _offloads(run), "nothing is offloaded", "add --optimizer-cpu-offload"),
    )


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """Settings of optimizer offload.

    `mode` is "off"; "update": the CPU updates the offloaded chunks; or "states": all chunks are offloaded between steps
    and updated on the device. The `fraction` of the elements is offloaded at the start. With `is_auto` chunks
    move during the run. `chunk_size` is in elements, `threshold` in bytes. With `overlap` offloaded chunks are updated
    during backward and the next forward. `directory` holds the offloaded files, None for host memory.
    """

    mode: str = OFF
    fraction: float = 0.0
    is_auto: bool = False
    chunk_size: int = 4 * _MIB
    threshold: int = 0
    overlap: bool = False
    directory: str | None = None


def offload_settings(optimizer: OptimizerConfig, offload: OptimizerOffloadConfig) -> OffloadSettings:
    """The settings that the flags ask for. Conflicting flags are refused before, by rules."""
    if offload.offload_optimizer_states:
        return OffloadSettings(
            mode=STATES, fraction=1.0, chunk_size=offload.optimizer_offload_chunk_size, directory=offload.offload_dir
        )
    if not updates_on_cpu(optimizer, offload):
        return OffloadSettings(chunk_size=offload.optimizer_offload_chunk_size)
    is_auto = policy_of(optimizer, offload) == "auto"
    fraction = 1.0 if is_auto else offload.optimizer_offload_fraction
    return OffloadSettings(
        mode=UPDATE if fraction > 0 else OFF,
        fraction=fraction,
        is_auto=is_auto,
        chunk_size=offload.optimizer_offload_chunk_size,
        threshold=offload.optimizer_offload_auto_threshold,
        overlap=offload.overlap_cpu_optimizer_d2h_h2d and fraction > 0,
        directory=offload.offload_dir,
    )


def updates_on_cpu(optimizer: OptimizerConfig, offload: OptimizerOffloadConfig) -> bool:
    """Returns whether the flags ask for updates on the CPU, even for a fraction of 0."""
    return offload.optimizer_cpu_offload or optimizer.optimizer == HYBRID


def policy_of(optimizer: OptimizerConfig, offload: OptimizerOffloadConfig) -> str:
    """Returns static or auto."""
    return offload.optimizer_offload_policy or ("auto" if optimizer.optimizer == HYBRID else "static")
