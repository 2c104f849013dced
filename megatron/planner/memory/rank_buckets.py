"""The buckets of a pipeline rank as numbers, for any mesh: where they are cut, and the sums that memory depends on.

The order of parameters is that of the decoder's description, and the cuts are those of spec/buckets.py, as in a run.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.base.mesh import Mesh
from megatron.config.data_parallel import DataParallelSettings
from megatron.config.optimizer import OptimizerConfig
from megatron.config.optimizer_offload import OffloadSettings
from megatron.spec.buckets import ALIGN, GRADIENT_BLOCKS, IN_FLIGHT, cuts, default_bucket_size
from megatron.spec.decoder import Placed
from megatron.spec.optimizer_state import OptimizerBytes, optimizer_bytes
from megatron.spec.parameter import local_numel
from megatron.spec.sizes import FP32, Target

_Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Buckets:
    """The buckets of a rank in the order in which backward completes them, [B] each.

    sizes: elements, padding included. shards: the number of slices into which each is divided. copies: the number of
    ranks that hold the same slice. on_host: whether its weights live in host memory. places: of its parameters among
    `parameters`.
    """

    sizes: _Numbers
    shards: _Numbers
    copies: _Numbers
    on_host: NDArray[np.bool_]
    places: Sequence[Sequence[int]]
    parameters: Sequence[str]

    @property
    def names(self) -> list[list[str]]:
        """Names of the parameters of each."""
        return [[self.parameters[place] for place in places] for places in self.places]

    @property
    def slices(self) -> _Numbers:
        """Elements of a rank's slice of each."""
        return self.sizes // self.shards


class BucketSums(NamedTuple):
    """Sums over the buckets of a rank, in elements; or [N] of each, of N ranks.

    numel: of its parameters. elements, slices: of all buckets with padding, and of the rank's slices of them. hosted,
    hosted_slices: of those that live in host memory. widest, widest_hosted: the largest slice. sharded: the largest
    bucket of which ranks have slices. blocks: those of these that gradients need at once where no rank keeps all. late:
    the part of them that only the gradient of the embedding needs, which is the last one of a backward.
    resident, pair: the largest bucket in host memory, and the two largest. staging, at_end: bytes of work space of the
    largest reduction, and of those that the end of a step waits for.
    """

    numel: Any
    elements: Any
    slices: Any
    hosted: Any
    hosted_slices: Any
    widest: Any
    widest_hosted: Any
    sharded: Any
    blocks: Any
    late: Any
    resident: Any
    pair: Any
    staging: Any
    at_end: Any


class RankBuckets:
    """The buckets of these parameters of a rank. on_host: names of those that live in host memory."""

    def __init__(self, parameters: dict[str, Placed], on_host: Collection[str] = ()) -> None:
        placed = dict(reversed(parameters.items()))
        specs = {id(parameter.spec): parameter.spec for parameter in placed.values()}  # alike layers share theirs
        numbers = {key: number for number, key in enumerate(specs)}
        self._names, self._specs = list(placed), list(specs.values())
        self._spec_of = [numbers[id(parameter.spec)] for parameter in placed.values()]
        self._kinds = [(each.stage, each.on_both_ends, name in on_host) for name, each in placed.items()]
        self._runs: dict[tuple[str, ...], dict[tuple[str, bool, Hashable], list[int]]] = {}
        self._elements: dict[Hashable, list[int]] = {}
        self._cuts: dict[Hashable, tuple[Any, ...]] = {}
        self._buckets: dict[Hashable, Buckets] = {}
        self._sums: dict[Hashable, BucketSums] = {}
        self._optimizer: dict[Hashable, OptimizerBytes] = {}

    def of(self, mesh: Mesh, settings: DataParallelSettings) -> Buckets:
        """Returns the buckets under a mesh."""
        key = _key(mesh, settings)
        if key not in self._buckets:
            copies = {view: mesh.copies(view) for view in mesh.views}
            shards = {v: 1 if settings.shards == "no_shard" else n // settings.instances for v, n in copies.items()}
            elements, views, on_host, places = self._cut(mesh, settings.bucket_size, max(shards.values()))
            divided = np.array([shards[view] for view in views])
            step = ALIGN * divided
            ranks = np.array([copies[view] for view in views])
            self._buckets[key] = Buckets(
                -(-elements // step) * step, divided, ranks // divided, on_host, places, self._names
            )
        return self._buckets[key]

    def sums(self, mesh: Mesh, settings: DataParallelSettings, target: Target) -> BucketSums:
        """Returns the sums of the buckets under a mesh."""
        key = _key(mesh, settings), settings.rounds_grads
        if key not in self._sums:
            buckets = self.of(mesh, settings)
            sizes, slices, hosted = buckets.sizes, buckets.slices, buckets.on_host
            sharded, on_host = np.sort(sizes[buckets.shards > 1])[::-1], np.sort(sizes[hosted])[::-1]
            staging = np.sort(staging_bytes(buckets, settings, target))[::-1]
            totals = [part.sum() for part in (sizes, slices, sizes[hosted], slices[hosted])]
            largest = [part.max(initial=0) for part in (slices, slices[hosted], sharded)]
            embeds = np.array([any(name.startswith("embedding.") for name in names) for names in buckets.names])
            early = np.sort(sizes[(buckets.shards > 1) & ~embeds])[::-1][:GRADIENT_BLOCKS].sum()
            blocks = sharded[:GRADIENT_BLOCKS].sum()
            most = [blocks, blocks - early, on_host[:1].sum(), on_host[:2].sum()]
            work = [staging[:1].sum(), staging[:IN_FLIGHT].sum()]
            self._sums[key] = BucketSums(sum(self._numels(mesh)), *map(int, (*totals, *largest, *most, *work)))
        return self._sums[key]

    def optimizer(
        self,
        mesh: Mesh,
        settings: DataParallelSettings,
        optimizer: OptimizerConfig,
        offload: OffloadSettings,
        *,
        half: bool,
    ) -> OptimizerBytes:
        """Returns the bytes of the optimizer's state of the rank's slices. Optimizer and `half` are the same in all
        calls."""
        key = _key(mesh, settings), offload
        if key not in self._optimizer:
            slices = self.of(mesh, settings).slices.tolist()
            self._optimizer[key] = optimizer_bytes(slices, optimizer, offload, half=half)
        return self._optimizer[key]

    def _numels(self, mesh: Mesh) -> list[int]:
        """Elements of a rank's part of each parameter."""
        key = mesh.tp, mesh.ep, mesh.etp
        if key not in self._elements:
            sizes = mesh.sizes
            numels = [local_numel(spec, sizes) for spec in self._specs]
            self._elements[key] = [numels[number] for number in self._spec_of]
        return self._elements[key]

    def _cut(self, mesh: Mesh, bucket_size: int | None, shards: int) -> tuple[Any, ...]:
        """[B] of elements without padding, view, whether it lives in host memory, and the places of its parameters."""
        numels = self._numels(mesh)
        size = bucket_size or default_bucket_size(sum(numels), shards)
        key = mesh.tp, mesh.ep, mesh.etp, size
        if key not in self._cuts:
            buckets = [
                (places[stop - 1], elements, view, hosted, places[first:stop])
                for (view, hosted, _), places in self._run(mesh).items()
                for first, stop, elements in cuts([numels[place] for place in places], size)
            ]
            _, elements, views, hosted, places = zip(*sorted(buckets), strict=True)
            self._cuts[key] = np.array(elements), views, np.array(hosted), places
        return self._cuts[key]

    def _run(self, mesh: Mesh) -> dict[tuple[str, bool, Hashable], list[int]]:
        """Places of the parameters that share buckets, by view, by whether they live in host memory, and by kind."""
        if mesh.views not in self._runs:
            views = [mesh.view(spec.axis) for spec in self._specs]
            runs: dict[tuple[str, bool, Hashable], list[int]] = {}
            for place, (number, kind) in enumerate(zip(self._spec_of, self._kinds, strict=True)):
                runs.setdefault((views[number], kind[-1], kind), []).append(place)
            self._runs[mesh.views] = runs
        return self._runs[mesh.views]


def staging_bytes(buckets: Buckets, settings: DataParallelSettings, target: Target) -> _Numbers:
    """Returns [B] the bytes of work space that the reduction of each bucket takes.

    On the CPU a rank receives the other ranks' versions of its slice before it adds them; NCCL adds while it receives.
    A bucket that is kept in another dtype than it is reduced in is converted first.
    """
    wire = FP32 // 2 if settings.reduce_in_bf16 else FP32
    held = FP32 // 2 if settings.rounds_grads else FP32
    nbytes = wire * buckets.sizes if wire != held else np.zeros_like(buckets.sizes)
    if target.cpu:
        part, shards, copies = buckets.slices, buckets.shards, buckets.copies
        nbytes += wire * np.maximum((shards - 1) * part, (copies - 1) * -(-part // copies))
    return nbytes * ((buckets.shards > 1) | (buckets.copies > 1))


def _key(mesh: Mesh, settings: DataParallelSettings) -> Hashable:
    """Everything that the buckets of some parameters depend on."""
    ranks = mesh.tp, mesh.ep, mesh.etp, mesh.cp * mesh.dp, mesh.edp
    return *ranks, settings.shards == "no_shard", settings.instances, settings.bucket_size
