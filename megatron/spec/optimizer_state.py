"""The bytes of the optimizer's state on the device, in host memory and on disk, from sizes and flags alone.

A rank owns a slice of every bucket. A slice that is offloaded or stored in bf16 is divided into chunks. Bytes per
element:

| | on the device | offloaded, the CPU updates | offloaded, the device updates |
|---|---|---|---|
| master | 4 of a half-precision model, or 2 1/8 (remainder and ties); 0 in fp32 | 4 | as on the device |
| each moment of adam | 4, or 2 in bf16 | the same | the same |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.optimizer import OptimizerConfig
from megatron.config.optimizer_offload import OFF, STATES, UPDATE, OffloadSettings

STAGED = 2  # buffers that copies use in turn: one is filled while another is used
MASTER_KEYS = ("master", "remainder", "ties")  # stored tensors that hold the masters
_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class OptimizerBytes:
    """The optimizer's memory on one rank, in bytes.

    device: state that stays on the device. staging: buffers on the device through which offloaded state passes. host,
    disk: offloaded state there; `host` includes gradients and results of offloaded chunks in flight.
    """

    device: int
    staging: int
    host: int
    disk: int


def is_cut(config: OptimizerConfig, settings: OffloadSettings) -> bool:
    """Returns whether slices are divided into chunks.

    State that is converted is divided, too, so that fp32 copies exist of only one chunk at a time.
    """
    return settings.mode != OFF or is_packed(config)


def is_packed(config: OptimizerConfig) -> bool:
    """Returns whether some state, or the gradient, is stored in another dtype than fp32."""
    return config.use_precision_aware_optimizer and config.has_bf16_state


def cut(size: int, chunk_size: int) -> list[tuple[int, int]]:
    """Returns [(start, stop)] of the chunks of a slice of `size` elements. The last one may be smaller."""
    return [(start, min(start + chunk_size, size)) for start in range(0, size, chunk_size)]


def chunks_to_offload(sizes: Sequence[int], fraction: float) -> list[bool]:
    """Returns which chunks to offload for a `fraction` of all elements: the first ones, to the nearest whole chunk.

    sizes: elements of the chunks, in the order of backward. The first chunks have the most time for their copies:
    backward completes their gradients first, and the next forward reads their parameters last.
    """
    return [count > 0 for count in _offloaded_counts([(size, 1) for size in sizes], fraction)]


def _offloaded_counts(runs: Sequence[tuple[int, int]], fraction: float) -> list[int]:
    """Returns the chunks to offload of each run of (size, number of chunks), see `chunks_to_offload`."""
    if not 0 < fraction < 1:
        return [number if fraction >= 1 else 0 for _, number in runs]
    target, done, counts = fraction * _elements(runs), 0, list[int]()
    for size, number in runs:
        near = (2 * (target - done) + size) // (2 * size)  # the nearest whole number of such chunks
        counts.append(min(number, max(0, int(near))))
        done += size * counts[-1]
    return counts


def state_layout(config: OptimizerConfig, *, half: bool, on_cpu: bool) -> dict[str, tuple[str, int]]:
    """Returns stored tensor -> (dtype, elements of the model that share one of its own).

    half: the model is not fp32. on_cpu: the CPU updates these elements.
    """
    layout = {
        key: ("fp32" if field is None else getattr(config, field), 1) for key, field in config.rule_spec.state.items()
    }
    if on_cpu or (half and config.main_params_dtype == "fp32"):
        layout["master"] = ("fp32", 1)
    elif half:
        layout |= {"remainder": ("int16", 1), "ties": ("uint8", 8)}
    return layout


def element_bytes(config: OptimizerConfig, *, half: bool, on_cpu: bool) -> dict[str, float]:
    """Returns stored tensor -> bytes per element of the model."""
    width = {**_BYTES, "int16": 2, "uint8": 1}
    layout = state_layout(config, half=half, on_cpu=on_cpu)
    return {key: width[dtype] / share for key, (dtype, share) in layout.items()}


def state_bytes(config: OptimizerConfig, size: int, *, half: bool, on_cpu: bool) -> int:
    """Returns the bytes of the state of `size` elements, a multiple of 64."""
    return int(size * sum(element_bytes(config, half=half, on_cpu=on_cpu).values()))


def optimizer_bytes(
    slices: Sequence[int], config: OptimizerConfig, settings: OffloadSettings, *, half: bool
) -> OptimizerBytes:
    """Returns the memory of a rank whose slices have these sizes, in the order of backward. half: the model is not
    fp32.

    With the policy auto it is the memory at the beginning, when all state is offloaded. Buffers for conversions (see
    `is_packed`) are included.
    """
    if not is_cut(config, settings):
        return OptimizerBytes(state_bytes(config, sum(slices), half=half, on_cpu=False), 0, 0, 0)
    chunk = settings.chunk_size
    runs = [run for size in slices for run in ((chunk, size // chunk), (size % chunk, 1)) if run[0] and run[1]]
    counts = _offloaded_counts(runs, settings.fraction)
    offloaded = [(size, count) for (size, _), count in zip(runs, counts, strict=True) if count]
    resident = [(size, number - count) for (size, number), count in zip(runs, counts, strict=True) if number > count]
    by_cpu = settings.mode == UPDATE
    stored = state_bytes(config, _elements(offloaded), half=half, on_cpu=by_cpu)
    largest, buffers = _largest(offloaded), min(STAGED, sum(count for _, count in offloaded))
    passing = 0
    if by_cpu:
        gradients = _elements(offloaded) if settings.overlap else buffers * largest
        results = buffers * largest * (2 if half else 4 if settings.directory else 0)
        passing = 4 * gradients + results + 4 * largest * len(converted_values(config, half=half, on_cpu=True))
    converted = 4 * len(converted_values(config, half=half, on_cpu=False))
    staging = converted * _largest(runs if settings.mode == STATES else resident)
    if settings.mode == STATES:
        staging += buffers * state_bytes(config, largest, half=half, on_cpu=False)
    return OptimizerBytes(
        device=state_bytes(config, _elements(resident), half=half, on_cpu=False),
        staging=staging,
        host=passing + (0 if settings.directory else stored),
        disk=stored if settings.directory else 0,
    )


def _elements(runs: Sequence[tuple[int, int]]) -> int:
    return sum(size * number for size, number in runs)


def _largest(runs: Sequence[tuple[int, int]]) -> int:
    return max((size for size, _ in runs), default=0)


def converted_values(config: OptimizerConfig, *, half: bool, on_cpu: bool) -> list[str]:
    """Returns the values that exist as fp32 only while a chunk is updated."""
    layout = state_layout(config, half=half, on_cpu=on_cpu)
    gradient = ["gradient"] if config.main_grads_dtype == "bf16" and not on_cpu else []  # the CPU is sent fp32
    return gradient + [key for key, (dtype, _) in layout.items() if dtype in ("bf16", "int16")]
