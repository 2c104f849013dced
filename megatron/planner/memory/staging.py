"""Host memory of a background save: copies of the weights and optimizer states that a rank writes.

Weights in half precision are rounded masters. With the optimizer's states, only those that it does not train are
written. Every element is written by one rank. Ranks that hold the same elements take turns, parameter by parameter, and
of ranks along tp the first one writes what all of them hold. So the ranks of a pipeline rank differ, by as much as the
largest parameters; planned is the rank that writes most. States are written in fp32. Left out are tensors of a few
kilobytes: random states, biases of experts and histories of FP8 layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.config.optimizer import OptimizerConfig
from megatron.config.settings import RunSettings
from megatron.planner.memory.rank_buckets import RankBuckets
from megatron.schedule.partition import Stage
from megatron.spec.decoder import DecoderSpec
from megatron.spec.parameter import local_numel
from megatron.spec.sizes import FP32


def staged_bytes(
    spec: DecoderSpec,
    stages: Sequence[Stage],
    buckets: RankBuckets,
    settings: RunSettings,
    optimizer: OptimizerConfig | None,
    *,
    width: int,
    is_first: bool,
) -> int:
    """Returns the most bytes that a rank with these stages copies.

    buckets: of the rank. optimizer: None if its states are not saved. width: bytes of an element of a weight. is_first:
    whether it is the first pipeline rank, which writes a parameter that both ends hold.
    """
    mesh, placed = settings.mesh, spec.rank_parameters(stages)
    trained = 0 if optimizer is not None and width < FP32 else width  # bytes that are written of a trained weight
    keys = 0 if optimizer is None else len(optimizer.rule_spec.state) + (width < FP32)  # with the master
    frees_weights = settings.data_parallel.shards == "optim_grads_params"
    cut = buckets.of(mesh, settings.data_parallel)
    columns = (cut.names, cut.slices.tolist(), cut.shards.tolist(), cut.on_host.tolist())
    total = 0
    for view in mesh.views:
        numels = {
            name: local_numel(parameter.spec, mesh.sizes)
            for name, parameter in placed.items()
            if mesh.view(parameter.spec.axis) == view and (is_first or not parameter.on_both_ends)
        }
        turns = np.zeros(mesh.copies(view), np.int64)  # bytes of each of the ranks that hold copies
        pieces = 0  # of all buckets so far
        bucketed: set[str] = set()  # weights whose bytes are counted, or not written
        for names, size, shards, on_host in zip(*columns, strict=True):
            members = {name: numels[name] for name in names if name in numels}
            frees = on_host or (frees_weights and shards > 1)
            if frees or trained == 0:
                bucketed.update(members)
            if members and len(turns) == shards:
                total += size * (FP32 * keys + trained * frees)
            elif members:
                turns += _in_turns(list(members.values()), size, shards, len(turns), pieces, keys, trained * frees)
            pieces += len(names)
        for number, name in enumerate(placed):
            if name not in bucketed:
                turns[number % len(turns)] += width * numels.get(name, 0)
        total += int(turns.max())
    return total


def _in_turns(
    numels: Sequence[int], size: int, shards: int, ranks: int, pieces: int, keys: int, width: int
) -> NDArray[np.int64]:
    """Returns [ranks] the bytes that each rank writes of a bucket of which several have every slice.

    numels: of its parameters. size: of a slice. pieces: of parameters in the buckets before. keys: states of an element
    in fp32. width: bytes of its weight, 0 if that is written whole.
    """
    nbytes, start = np.zeros((ranks // shards, shards), np.int64), 0
    before = np.full(shards, pieces)
    for numel in numels:
        for shard in range(start // size, -(-(start + numel) // size)):
            part = min(start + numel, (shard + 1) * size) - max(start, shard * size)
            number = before[shard]
            for key in range(keys):
                nbytes[(keys * number + key) % len(nbytes), shard] += FP32 * part
            nbytes[number % len(nbytes), shard] += width * part
            before[shard] += 1
        start += numel
    return nbytes.reshape(-1)
