"""The tensors of a checkpoint: what this rank holds of each, as rectangles of global tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.sharded_tensor import ShardedTensor, flat_slice
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import Groups
from megatron.core.models.carried import CarriedTensors
from megatron.core.parameter import Parameter, ParamInfo
from megatron.core.transformer.moe.router import PREVIOUS_LOAD
from megatron.spec.buckets import Piece
from megatron.spec.moe import EXPERT_BIAS
from megatron.training.saved_run import CARRIED_PREFIX, FP8_PREFIX, LOAD_PREFIX, MODEL_PREFIX, OPTIMIZER_PREFIX


def model_tensors(parameters: dict[str, Parameter], groups: Groups) -> list[ShardedTensor]:
    """Returns every weight of this rank with its position in the global model."""
    return [
        sharded
        for number, (name, parameter) in enumerate(parameters.items())
        for sharded in _sharded(MODEL_PREFIX + name, parameter, groups, number)
    ]


def bias_tensors(buffers: Mapping[str, Tensor], groups: Groups) -> list[ShardedTensor]:
    """Returns the biases of the experts. buffers: of the model, by name."""
    return _replicated(MODEL_PREFIX, EXPERT_BIAS, buffers, groups)


def load_tensors(buffers: Mapping[str, Tensor], groups: Groups) -> list[ShardedTensor]:
    """Returns the load of the experts in the batch before. buffers: of the model, by name."""
    return _replicated(LOAD_PREFIX, PREVIOUS_LOAD, buffers, groups)


def _replicated(prefix: str, kind: str, buffers: Mapping[str, Tensor], groups: Groups) -> list[ShardedTensor]:
    """Returns the buffers of a kind, which all ranks of a stage hold."""
    writer = groups.tp.rank == 0 and groups.dp_cp.rank == 0
    return [
        ShardedTensor(prefix + name, buffer, tuple(buffer.shape), (0,), writer)
        for name, buffer in buffers.items()
        if name.endswith(f".{kind}")
    ]


def weight_tensors(
    parameters: dict[str, Parameter], data_parallel: DataParallel, groups: Groups
) -> list[ShardedTensor]:
    """Returns this rank's weights; of those whose memory is freed after use, its slices alone.

    A weight that stays must be loaded whole, also where ranks share its optimizer: nothing gathers it before the first
    update.
    """
    sharded_names = data_parallel.sharded_names
    staying = {name: parameter for name, parameter in parameters.items() if name not in sharded_names}
    return model_tensors(staying, groups) + [
        sharded
        for number, (piece, tensor) in enumerate(data_parallel.weights())
        if piece.name in sharded_names
        for sharded in _flat(MODEL_PREFIX + piece.name, tensor, piece, parameters[piece.name].info, groups, number)
    ]


def rounded_from_masters(weights: Sequence[ShardedTensor], data_parallel: DataParallel) -> list[ShardedTensor]:
    """Returns weights for a checkpoint that holds the optimizer, too: those in half precision are rounded masters, and
    need not be written."""
    trained = {
        MODEL_PREFIX + name: f"{OPTIMIZER_PREFIX}{name}/master"
        for bucket in data_parallel.buckets
        if bucket.dtype != torch.float32
        for name in bucket.parameters
    }
    return [dataclasses.replace(weight, rounded_from=trained.get(weight.name)) for weight in weights]


def optimizer_tensors(
    pieces: Iterable[tuple[Piece, str, Tensor]], parameters: dict[str, Parameter], groups: Groups
) -> list[ShardedTensor]:
    """Returns masters and moments of this rank, `pieces` of its optimizer, as rectangles of the global tensors."""
    return [
        sharded
        for number, (piece, key, tensor) in enumerate(pieces)
        for sharded in _flat(
            f"{OPTIMIZER_PREFIX}{piece.name}/{key}", tensor, piece, parameters[piece.name].info, groups, number
        )
    ]


def _flat(name: str, data: Tensor, piece: Piece, info: ParamInfo, groups: Groups, number: int) -> list[ShardedTensor]:
    section = info.section_at(piece.start)
    # Instances of the optimizer hold copies and take turns.
    replicas = groups.view(info.spec.axis).replicas
    writer = replicas.rank == number % replicas.size and info.held_first(section, groups)
    return flat_slice(
        name,
        data,
        start=piece.start - section.start,
        shape=section.shape,
        global_shape=info.spec.shape,
        offset=section.offset,
        writer=writer,
    )


def _sharded(name: str, parameter: Parameter, groups: Groups, number: int) -> list[ShardedTensor]:
    info = parameter.info
    # Copies over dp x cp or edp take turns, so that all hosts' disks write;
    # copies over tp leave it to the first of them.
    copies = groups.view(info.spec.axis).copies
    turn, data = copies.rank == number % copies.size, parameter.detach()
    return [
        ShardedTensor(name, part.of(data), info.spec.shape, part.offset, turn and info.held_first(part, groups))
        for part in info.sections
    ]


def rng_tensors(states: dict[str, Tensor], rank: int, *, writer: bool) -> list[ShardedTensor]:
    """Returns the states of this rank's generators of random numbers, by stream."""
    return [
        ShardedTensor(f"rng/{stream}/{rank}", state, tuple(state.shape), (0,), writer)
        for stream, state in states.items()
    ]


def carried_tensors(carried: CarriedTensors, groups: Groups) -> list[ShardedTensor]:
    """Returns this rank's share of the tensors that a run keeps and does not train, mapped from the files in which they
    are."""
    world = groups.world
    return [
        ShardedTensor(CARRIED_PREFIX + name, tensor.whole(), tensor.shape, (0,) * len(tensor.shape), writer=True)
        for number, (name, tensor) in enumerate(carried.tensors.items())
        if number % world.size == world.rank
    ]


def fp8_tensors(histories: Mapping[str, Tensor], groups: Groups) -> list[ShardedTensor]:
    """Returns the histories [3, length] of layers of the whole model, which all ranks hold."""
    return [
        ShardedTensor(FP8_PREFIX + name, history, tuple(history.shape), (0, 0), groups.world.rank == 0)
        for name, history in histories.items()
    ]
