"""Writes Megatron-LM's distributed checkpoints (--ckpt-format torch_dist, its default).

[Note: torch_dist] Tensors are those of the whole model, for any layout, with the names of Transformer Engine's layers.
The experts of a layer are one tensor. Those of all layers are one tensor with a leading dim of layers, unless only some
layers have experts, or some have delta nets; then each layer has its own. The optimizer is the distributed one, as
Megatron-LM saves it with --dist-ckpt-optim-fully-reshardable: `optimizer.state.KEY.` before the name of the weight.
Values other than tensors are in common.pt, which core 0.18 and later still read. Modules of Transformer Engine have one
object each for the state of FP8, without which a strict load fails; an empty one means that there is no such state.
With ep > 1 Megatron-LM has two optimizers, of the experts and of all else, so that the groups of both are there; their
tensors have the same names as one's.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.config.model import ModelConfig
from megatron.core.dist_checkpointing.dcp_writer import write_dcp
from megatron.core.dist_checkpointing.tensor_file import narrow
from megatron.core.dist_checkpointing.whole import WholeTensor
from megatron.core.models.mapping import Read, Table, gather
from megatron.core.models.mcore.arguments import refuse_what_has_no_argument
from megatron.core.models.mcore.delta_arguments import check_implementation
from megatron.core.models.mcore.moe_arguments import check_expert_shards
from megatron.core.models.mcore.names import PREDICTION_LAYER, CheckpointLayout, fused_norms, padded_rows, table
from megatron.core.models.mcore.publish import published
from megatron.core.models.mcore.training_state import MOMENTS, Adam, TrainingState, arguments_for, param_groups
from megatron.core.models.mcore.zero_centered import with_zero_centered
from megatron.core.models.source import Source, is_buffer, stored_dtype
from megatron.spec.decoder import LayerSpec, decoder_spec
from megatron.spec.delta_net import DeltaNetSpec
from megatron.spec.moe import ExpertsSpec
from megatron.spec.norm import NormSpec

COMMON_FILE, CONFIG_FILE = "common.pt", "metadata.json"
_LAYERS = "decoder.layers."
_LAYER = re.compile(rf"({re.escape(_LAYERS)})(\d+)\.(.*)")
_SHARDING = "fully_reshardable"


def write_torch_dist(
    source: Source,
    root: Path,
    *,
    tp: int,
    ep: int = 1,
    local: bool,
    dtype: torch.dtype,
    training: TrainingState,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> Path:
    """Writes the checkpoint of `training` under `root`, and the tracker. Memory: two chunks of tensors.

    The vocabulary is padded for `tp` ranks, and the optimizer of a model with experts is for `ep` of 1 or for any
    above; everything else suits any layout. `local` is for --transformer-impl local. Raises CheckpointError if the
    checkpoint exists, ConfigError for a model that Megatron-LM has no arguments for, and OSError, leaving nothing.
    """
    model = source.model
    assert model.num_layers
    refuse_what_has_no_argument(model)
    check_implementation(model, local=local)
    check_expert_shards(model, tp=1, ep=ep, etp=1)
    # Megatron-LM's own layers name their norms as Transformer Engine's, except with latent attention.
    renames = local and not model.multi_latent_attention
    layout = CheckpointLayout(
        1,
        1,
        (model.num_layers,),
        fused_norms=renames or not local,
        vocabulary=padded_rows(model, tp) * tp,
        fused_expert_norms=renames,
        splits_delta_nets=True,
    )
    source, training = with_zero_centered(source, training)
    names = table(model, layout)
    stacked = len(set(model.moe_layers)) == 1 and not model.has_delta_net
    held = _named(names, layout, stacked=stacked)
    tensors = _tensors(
        names, layout, held, "", dtype, lambda name, box: source.read(name, box, stored_dtype(name, dtype))
    )
    if training.adam:
        weights = {name: keys for name, keys in held.items() if not is_buffer(name)}
        for theirs, key in (("param", "master"), *zip(MOMENTS, MOMENTS)):
            read = functools.partial(_read_state, training.adam, key)
            tensors += _tensors(names, layout, weights, f"optimizer.state.{theirs}.", torch.float32, read)
    arguments = arguments_for(model, layout, dtype, training)
    if model.num_experts is not None:
        arguments.expert_model_parallel_size = ep
    common = training.common(arguments) | {"content_metadata": _CONTENT}
    if training.adam:
        common["optimizer"] = _optimizer(training.adam, training, has_two=ep > 1)
    objects = {name: [None] for name in _extra_states(model, layout, local=local, stacked=stacked)}
    with published(root, training) as folder:
        write_dcp(folder, tensors, objects, on_bytes)
        with open(folder / COMMON_FILE, "xb") as file:
            torch.save(common, file)
            file.flush()
            os.fsync(file.fileno())
        with open(folder / CONFIG_FILE, "x", encoding="ascii") as text:
            json.dump({"sharded_backend": "torch_dist", "sharded_backend_version": 1}, text)
            text.flush()
            os.fsync(text.fileno())
    return root / training.folder


_CONTENT = {
    "distrib_optim_sharding_type": _SHARDING,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def _named(names: Table, layout: CheckpointLayout, *, stacked: bool) -> dict[str, list[str]]:
    """Returns the keys of the tensors behind each name; `stacked`: of all layers behind one."""
    held: dict[str, list[str]] = {}
    for key in names.theirs:
        name = key.removeprefix(layout.key(0, 0, 0, ""))
        match = _LAYER.fullmatch(name) if stacked else None
        held.setdefault(f"{match[1]}{match[3]}" if match else name, []).append(key)
    return held


def _tensors(
    names: Table, layout: CheckpointLayout, held: dict[str, list[str]], prefix: str, dtype: torch.dtype, read: Read
) -> list[WholeTensor]:
    """Returns the global tensors of the weights, or of state in the shapes of the weights. held: see `_named`."""
    tensors = []
    for name, keys in held.items():
        tensor_dtype = stored_dtype(name, dtype)
        shape = layout.full_shape(name, names.theirs[keys[0]])
        whole = functools.partial(_read_one, names, keys[0], tensor_dtype, read)
        if name.startswith(_LAYERS) and not _LAYER.fullmatch(name):
            shape, whole = (len(keys), *shape), functools.partial(_read_stack, names, keys, tensor_dtype, read)
        tensors.append(WholeTensor(prefix + name, tensor_dtype, shape, whole))
    return tensors


def _read_one(names: Table, key: str, dtype: torch.dtype, read: Read, box: Box) -> Tensor:
    return gather(names.of_theirs(key, box), box, dtype, read)


def _read_stack(names: Table, keys: list[str], dtype: torch.dtype, read: Read, box: Box) -> Tensor:
    out = torch.empty(box.shape, dtype=dtype)
    inner = Box(box.offset[1:], box.shape[1:])
    for number in range(box.shape[0]):
        layer = Box((number, *(0 for _ in inner.shape)), (1, *inner.shape))
        narrow(out, layer)[0] = _read_one(names, keys[box.offset[0] + number], dtype, read, inner)
    return out


def _read_state(adam: Adam, key: str, name: str, box: Box) -> Tensor:
    return adam.read(name, key, box)


def _optimizer(adam: Adam, training: TrainingState, *, has_two: bool) -> dict[Any, Any]:
    assert training.scheduler
    groups = param_groups(adam, training.scheduler)
    state: dict[Any, Any] = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": _SHARDING}
    state |= {"grad_scaler": adam.loss_scale} if adam.loss_scale else {}
    if not has_two:
        return state
    of_experts = [group | {"is_expert_parallel": True} for group in groups[:1]]
    return {0: state, 1: state | {"optimizer": {"param_groups": of_experts}}}


def _extra_states(model: ModelConfig, layout: CheckpointLayout, *, local: bool, stacked: bool) -> list[str]:
    """Returns the names of the objects: module, place and count, of layers if `stacked`, and of experts.

    Local layers have those of matrices only.
    """
    spec, objects = decoder_spec(model), []
    for number, layer in enumerate(spec.layers):
        name, place, count = (_LAYERS, [number], [len(spec.layers)]) if stacked else (f"{_LAYERS}{number}.", [], [])
        objects += _objects(name, layer, layout, place, count, local=local)
    for depth, prediction in enumerate(spec.predictions):
        name = f"mtp.layers.{depth}."
        modules = ["eh_proj"] if local else ["enorm", "hnorm", "eh_proj", "final_layernorm"]
        objects += [_object(name + module, [], []) for module in modules]
        objects += _objects(f"{name}{PREDICTION_LAYER}.", prediction.layer, layout, [], [], local=local)
    return objects if local else [*objects, _object("decoder.final_layernorm", [], [])]


def _objects(
    name: str, layer: LayerSpec, layout: CheckpointLayout, place: list[int], count: list[int], *, local: bool
) -> list[str]:
    """Returns the names of the objects of a layer whose modules begin with `name`, at `place` among `count`."""
    parts = dict(layer.parts())
    inside = fused_norms(parts, layout).values()
    modules = list(layer.linears())
    if not local:
        modules += [] if isinstance(layer.attention, DeltaNetSpec) else ["self_attention.core_attention"]
        modules += [path for path, part in parts.items() if isinstance(part, NormSpec) and path not in inside]
    objects = [_object(name + module, place, count) for module in modules]
    if isinstance(experts := parts.get("mlp.experts"), ExpertsSpec):
        for matrix, expert in itertools.product(("linear_fc1", "linear_fc2"), range(experts.experts)):
            module = f"{name}mlp.experts.experts.{matrix}"
            objects.append(_object(module, [*place, expert], [*count, experts.experts]))
    return objects


def _object(module: str, place: list[int], count: list[int]) -> str:
    """The object of a module at `place` among `count`; without them it is the only one."""
    return f"{module}._extra_state/shard_{'.'.join(map(str, place or [0]))}_{'.'.join(map(str, count or [1]))}"
