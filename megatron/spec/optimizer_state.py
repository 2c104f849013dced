"""Bytes of the optimizer's state: on the device, in host memory, on disk. From sizes and flags alone.

A rank owns a slice of every bucket; offloaded or stored in bf16, a slice is cut into chunks. Bytes per element:

| | device | offloaded, CPU updates | offloaded, device updates |
|---|---|---|---|
| master | 4 of a half-precision model, or 2 1/8 (remainder and ties); 0 in fp32 | 4 | as near |
| moments of adam, each | 4, or 2 in bf16 | the same | the same |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.optimizer import OptimizerConfig
from megatron.config.optimizer_offload import OFF, STATES, UPDATE, OffloadSettings

STAGED = 2  # buffers that copies take in turn: one is filled while another is used
MASTER_KEYS = ("master", "remainder", "ties")  # stored tensors that hold the masters
_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class OptimizerBytes:
    """device: state there; staging: buffers there through which state passes. host, disk: the offloaded state, with
    gradients and results of offloaded chunks in flight."""

    device: int
    staging: int
    host: int
    disk: int


def is_cut(config: OptimizerConfig, settings: OffloadSettings) -> bool:
    """Whether slices are cut into chunks. State that is converted is, too: fp32 copies then exist of one chunk only."""
    return settings.mode != OFF or is_packed(config)


def is_packed(config: OptimizerConfig) -> bool:
    """Whether some state is not stored as fp32."""
    dtypes = (config.exp_avg_dtype, config.exp_avg_sq_dtype, config.main_params_dtype)
    return config.use_precision_aware_optimizer and "bf16" in dtypes


def cut(size: int, chunk_size: int) -> list[tuple[int, int]]:
    """[(start, stop)] of the chunks of a slice of `size` elements: whole ones and a rest."""
    return [(start, min(start + chunk_size, size)) for start in range(0, size, chunk_size)]


def first_far(sizes: Sequence[int], share: float) -> list[bool]:
    """Returns the chunks to offload for a `share` of all elements: the first ones, to the nearest whole chunk.

    sizes: in the order of backward. Its first chunks get their gradients first, and the next forward reads them last: so
    they have the most time.
    """
    target, done, found = share * sum(sizes), 0, []
    for size in sizes:
        is_far = share > 0 and (share >= 1 or target - done >= size / 2)
        found.append(is_far)
        done += size * is_far
    return found


def state_layout(config: OptimizerConfig, *, half: bool, far: bool) -> dict[str, tuple[str, int]]:
    """Stored tensor -> (dtype, elements of the model that share one of its own). `far`: offloaded and updated by the CPU."""
    if config.rule == "sgd":
        layout = {"momentum_buffer": ("fp32", 1)}
    else:
        layout = {"exp_avg": (config.exp_avg_dtype, 1), "exp_avg_sq": (config.exp_avg_sq_dtype, 1)}
    if far or (half and config.main_params_dtype == "fp32"):
        layout["master"] = ("fp32", 1)
    elif half:
        layout |= {"remainder": ("int16", 1), "ties": ("uint8", 8)}
    return layout


def element_bytes(config: OptimizerConfig, *, half: bool, far: bool) -> dict[str, float]:
    """Returns stored tensor -> bytes per element of the model."""
    width = {**_BYTES, "int16": 2, "uint8": 1}
    layout = state_layout(config, half=half, far=far)
    return {key: width[dtype] / share for key, (dtype, share) in layout.items()}


def state_bytes(config: OptimizerConfig, size: int, *, half: bool, far: bool) -> int:
    """Returns the bytes of the state of `size` elements, a multiple of 64."""
    return int(size * sum(element_bytes(config, half=half, far=far).values()))


def optimizer_bytes(
    slices: Sequence[int], config: OptimizerConfig, settings: OffloadSettings, *, half: bool
) -> OptimizerBytes:
    """What a rank needs whose slices have these sizes, in the order of backward; `half`: the model is not fp32.

    With the policy auto: at the beginning, when everything is offloaded. Buffers for conversions (see `is_packed`) count.
    """
    if not is_cut(config, settings):
        return OptimizerBytes(sum(state_bytes(config, size, half=half, far=False) for size in slices), 0, 0, 0)
    sizes = [stop - start for size in slices for start, stop in cut(size, settings.chunk_size)]
    is_far = first_far(sizes, settings.far)
    far = [size for size, away in zip(sizes, is_far, strict=True) if away]
    near = [size for size, away in zip(sizes, is_far, strict=True) if not away]
    by_cpu = settings.mode == UPDATE
    stored = sum(state_bytes(config, size, half=half, far=by_cpu) for size in far)
    largest, buffers = max(far, default=0), min(STAGED, len(far))
    passing = 0
    if by_cpu:
        gradients = sum(far) if settings.overlap else buffers * largest
        results = buffers * largest * (2 if half else 4 if settings.directory else 0)
        passing = 4 * gradients + results + 4 * largest * len(_converted(config, half=half, far=True))
    converted = 4 * len(_converted(config, half=half, far=False))
    staging = converted * max(sizes if settings.mode == STATES else near, default=0)
    if settings.mode == STATES:
        staging += buffers * state_bytes(config, largest, half=half, far=False)
    return OptimizerBytes(
        device=sum(state_bytes(config, size, half=half, far=False) for size in near),
        staging=staging,
        host=passing + (0 if settings.directory else stored),
        disk=stored if settings.directory else 0,
    )


def _converted(config: OptimizerConfig, *, half: bool, far: bool) -> list[str]:
    """Values that exist as fp32 only while a chunk is updated."""
    layout = state_layout(config, half=half, far=far)
    return [key for key, (dtype, _) in layout.items() if dtype in ("bf16", "int16")]
