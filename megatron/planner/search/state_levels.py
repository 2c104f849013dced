"""The memory of parameters, gradients and optimizer state for many layouts at once, from the sizes of a rank's buckets.

The formulas are those of planner/memory/model_states.py, and exact but for three things, which are lower here: a part
of the optimizer's state in host memory is not cut into chunks, weights in host memory count as none, and a rank with
the embedding has one block less for gradients.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.base.mesh import DENSE, Mesh
from megatron.config.data_parallel import DataParallelSettings
from megatron.config.optimizer import OptimizerConfig
from megatron.config.optimizer_offload import OFF, STATES, OffloadSettings
from megatron.planner.memory.model_states import NORM_BYTES, staging_bytes
from megatron.planner.search.layer_levels import ManyBytes
from megatron.planner.search.stage_levels import StageKind
from megatron.spec.buckets import ALIGN, GRADIENT_BLOCKS, IN_FLIGHT, NORM_ROW, default_bucket_size, round_up
from megatron.spec.decoder import DecoderSpec, LayerSpec
from megatron.spec.optimizer_state import STAGED, converted_values, element_bytes, is_cut
from megatron.spec.parameter import ParamSpec, local_numel
from megatron.spec.sizes import FP32, Target

BUCKET_SUMS = ("elements", "slices", "widest", "count", "blocks", "sharded", "staging", "at_end")


@dataclass(frozen=True)
class StateColumns:
    """What the state of one rank depends on, for each of N layouts.

    buckets: [N] of each of BUCKET_SUMS, see `RankBuckets.sums`. shards_weights, keeps_gradients, overlaps: [N] of bool:
    parameters are sharded; every rank keeps whole gradients; reductions are overlapped with the last backward. offload:
    the optimizer's settings for each number in `offload_of`, [N]. quantized: [N] bytes of weights in FP8.
    """

    buckets: dict[str, ManyBytes]
    shards_weights: NDArray[np.bool_]
    keeps_gradients: NDArray[np.bool_]
    overlaps: NDArray[np.bool_]
    offload: Sequence[OffloadSettings]
    offload_of: NDArray[np.integer]
    quantized: ManyBytes


@dataclass(frozen=True)
class StateLevels:
    """Bytes, [N] each: between steps, in addition during a step, of a reduction, and in addition at the end of a
    step."""

    start: ManyBytes
    step: ManyBytes
    reduction: ManyBytes
    end: ManyBytes


def state_levels(columns: StateColumns, optimizer: OptimizerConfig, width: int, *, weights_stay: bool) -> StateLevels:
    """Returns the levels. width: bytes per element of a parameter. weights_stay: none live in host memory."""
    sums = columns.buckets
    start = optimizer.main_grad_bytes * np.where(columns.keeps_gradients, sums["elements"], sums["slices"])
    start += FP32 * np.where(columns.keeps_gradients, 0.0, sums["blocks"])
    step = columns.quantized
    if weights_stay:
        start += width * np.where(columns.shards_weights, sums["slices"], sums["elements"])
        step = step + 2 * width * np.where(columns.shards_weights, sums["sharded"], 0.0)
    for number, offload in enumerate(columns.offload):
        mask = columns.offload_of == number
        slices, widest, count = (sums[name][mask] for name in ("slices", "widest", "count"))
        start[mask] += _optimizer_bytes(slices, widest, count, optimizer, offload, half=width < FP32)
    end = np.maximum(sums["at_end"], sums["widest"] // NORM_ROW * NORM_BYTES)
    return StateLevels(start, step, np.where(columns.overlaps, sums["staging"], 0.0), end)


class RankBuckets:
    """The buckets of the pipeline ranks of a model. layers: the spec of each kind of layer."""

    def __init__(self, spec: DecoderSpec, layers: Sequence[LayerSpec], target: Target, *, weights_stay: bool) -> None:
        self._spec, self._layers, self._target, self._pads = spec, layers, target, weights_stay
        self._sums: dict[Hashable, tuple[float, ...]] = {}
        self._of_layer: dict[tuple[int, ...], dict[str, list[int]]] = {}

    def sums(self, stages: Sequence[StageKind], mesh: Mesh, settings: DataParallelSettings) -> tuple[float, ...]:
        """Returns of a rank with these stages, in the order of BUCKET_SUMS, in elements: of all buckets with padding;
        of its slices; of the largest slice; the number of buckets; of the largest that are in use at once for gradients
        of which every rank keeps a slice; of the largest sharded one; and in bytes the work space of a reduction, and
        of those that the end of a step waits for."""
        copies = {view: mesh.copies(view) for view in mesh.views}
        key = (
            tuple(stages),
            mesh.tp,
            mesh.ep,
            mesh.etp,
            *copies.values(),
            settings.shards == "no_shard",
            settings.instances,
            settings.rounds_grads,
        )
        if key not in self._sums:
            self._sums[key] = self._sums_of(stages, mesh, settings, copies)
        return self._sums[key]

    def _sums_of(
        self, stages: Sequence[StageKind], mesh: Mesh, settings: DataParallelSettings, copies: Mapping[str, int]
    ) -> tuple[float, ...]:
        shards = {v: 1 if settings.shards == "no_shard" else n // settings.instances for v, n in copies.items()}
        runs = [(view, numels) for view, numels in self._runs(stages, mesh) if numels]
        size = settings.bucket_size or default_bucket_size(
            sum(map(sum, (numels for _, numels in runs))), max(shards.values())
        )
        buckets = [
            (round_up(nbytes, ALIGN * shards[view]) if self._pads else nbytes, view)
            for view, numels in runs
            for nbytes in _bucket_sizes(numels, size)
        ]
        sharded = sorted((size for size, view in buckets if shards[view] > 1), reverse=True)
        # Without one that only the embedding's gradient needs, which is not larger.
        embeds = any(stage.embedding for stage in stages)
        staging = sorted(
            (
                staging_bytes(n, shards[view], copies[view] // shards[view], settings, self._target)
                for n, view in buckets
            ),
            reverse=True,
        )
        slices = [size // shards[view] for size, view in buckets]
        return (
            sum(size for size, _ in buckets),
            sum(slices),
            max(slices, default=0),
            len(slices),
            sum(sharded[embeds : embeds + GRADIENT_BLOCKS]) if self._pads else 0,
            max(sharded, default=0) if self._pads else 0,
            max(staging, default=0),
            sum(staging[:IN_FLIGHT]),
        )

    def _runs(self, stages: Sequence[StageKind], mesh: Mesh) -> Iterator[tuple[str, list[int]]]:
        """(view, elements of each parameter) of the parameters that share buckets, in the order of backward."""
        spec = self._spec
        words = [spec.embedding.words]
        if spec.embeds_at_both_ends and any(stage.embedding != stage.head for stage in stages):
            yield DENSE, self._numels(words, mesh)[DENSE]
            words = []
        for stage in stages:
            found: dict[str, list[int]] = {view: [] for view in mesh.views}
            parts = []
            if stage.head:
                for prediction in reversed(spec.predictions):
                    parts.append(self._numels([parameter for _, parameter in prediction.parameters()], mesh))
                final = [parameter for _, parameter in spec.final_norm.parameters()]
                parts.append(self._numels([*final, *([] if spec.tied else [spec.output.weight])], mesh))
            for kind in reversed(stage.kinds):
                parts.append(self._layer(kind, mesh))
            if stage.embedding:
                positions = spec.embedding.positions
                parts.append(self._numels([*words, *([] if positions is None else [positions])], mesh))
            for part in parts:
                for view, numels in part.items():
                    found[view] += numels
            yield from found.items()

    def _layer(self, kind: int, mesh: Mesh) -> dict[str, list[int]]:
        key = (kind, mesh.tp, mesh.ep, mesh.etp)
        if key not in self._of_layer:
            self._of_layer[key] = self._numels([each for _, each in self._layers[kind].parameters()], mesh)
        return self._of_layer[key]

    def _numels(self, parameters: Sequence[ParamSpec], mesh: Mesh) -> dict[str, list[int]]:
        """View -> elements of a rank's parts of these parameters, the last one first."""
        sizes, found = mesh.sizes, {view: list[int]() for view in mesh.views}
        for parameter in reversed(parameters):
            found[mesh.view(parameter.axis)].append(local_numel(parameter, sizes))
        return found


def _bucket_sizes(numels: Sequence[int], bucket_size: int) -> Iterator[int]:
    """Elements of buckets of whole parameters, each at its own multiple of ALIGN, before the buckets are padded."""
    ends = list(itertools.accumulate(round_up(numel, ALIGN) for numel in numels))
    start = 0
    while start < ends[-1]:
        end = ends[min(bisect.bisect_left(ends, start + bucket_size), len(ends) - 1)]
        yield end - start
        start = end


def _optimizer_bytes(
    slices: ManyBytes,
    widest: ManyBytes,
    count: ManyBytes,
    optimizer: OptimizerConfig,
    offload: OffloadSettings,
    *,
    half: bool,
) -> ManyBytes:
    """The optimizer's state on the device and the buffers that it passes, of slices of so many elements in all, in the
    largest, and their number. See spec/optimizer_state.py."""
    element = sum(element_bytes(optimizer, half=half, on_cpu=False).values())
    if not is_cut(optimizer, offload):
        return slices * element
    chunk = np.minimum(widest, offload.chunk_size)
    away = np.minimum(slices, offload.fraction * slices + chunk / 2) if offload.fraction else 0.0 * slices
    converted = FP32 * len(converted_values(optimizer, half=half, on_cpu=False)) * chunk
    staging = converted if offload.mode in (OFF, STATES) else 0.0
    if offload.mode == STATES:
        staging = staging + np.minimum(STAGED, count) * chunk * element
    return (slices - away) * element + staging
