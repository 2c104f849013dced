"""Writes Megatron-LM's distributed checkpoints (--ckpt-format torch_dist, its default).

[Note: torch_dist]
Tensors are those of the whole model, for any layout, with the names of Transformer Engine's layers; those of all layers
are one tensor with a leading dim of layers. The optimizer is the distributed one, as Megatron-LM saves it with
--dist-ckpt-optim-fully-reshardable: `optimizer.state.KEY.` before the name of the weight. Values other than tensors are
in common.pt, which core 0.18 and later still read. Modules of Transformer Engine have one object each for the state of
FP8, without which a strict load fails; an empty one means that there is no such state.
"""

from __future__ import annotations

import functools
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
from megatron.core.models.mcore.names import CheckpointLayout, padded_rows, table
from megatron.core.models.mcore.publish import published
from megatron.core.models.mcore.training_state import MOMENTS, Adam, TrainingState, arguments_for, param_groups
from megatron.core.models.source import Source

COMMON_FILE, CONFIG_FILE = "common.pt", "metadata.json"
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.*)")
_SHARDING = "fully_reshardable"


def write_torch_dist(
    source: Source,
    root: Path,
    *,
    tp: int,
    local: bool,
    dtype: torch.dtype,
    training: TrainingState,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> Path:
    """Writes the checkpoint of `training` under `root`, and the tracker. Memory: two chunks of tensors.

    The vocabulary is padded for `tp` ranks; everything else suits any layout. `local` is for --transformer-impl local.
    Raises CheckpointError if the checkpoint exists, ConfigError for a model that Megatron-LM has no arguments for, and
    OSError, leaving nothing.
    """
    model = source.model
    assert model.num_layers
    refuse_what_has_no_argument(model)
    layout = CheckpointLayout(1, 1, (model.num_layers,), True, padded_rows(model, tp) * tp)
    names = table(model, layout)
    tensors = _tensors(names, layout, "", dtype, lambda name, box: source.read(name, box, dtype))
    if training.adam:
        for theirs, key in (("param", "master"), *zip(MOMENTS, MOMENTS)):
            read = functools.partial(_read_state, training.adam, key)
            tensors += _tensors(names, layout, f"optimizer.state.{theirs}.", torch.float32, read)
    common = training.common(arguments_for(model, layout, dtype, training)) | {"content_metadata": _CONTENT}
    if training.adam:
        common["optimizer"] = _optimizer(training.adam, training)
    objects = {name: [None] for name in _extra_states(model, local=local)}
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


def _tensors(names: Table, layout: CheckpointLayout, prefix: str, dtype: torch.dtype, read: Read) -> list[WholeTensor]:
    """Returns the global tensors of the weights, or of state in the shapes of the weights."""
    held: dict[str, list[str]] = {}
    beginning = layout.key(0, 0, "")
    for key in names.theirs:
        name = key.removeprefix(beginning)
        match = _LAYER.fullmatch(name)
        held.setdefault(f"{match[1]}{match[3]}" if match else name, []).append(key)
    found = []
    for name, keys in held.items():
        shape = layout.full_shape(name, names.theirs[keys[0]])
        whole = functools.partial(_read_one, names, keys[0], dtype, read)
        if _LAYER.fullmatch(keys[0].removeprefix(beginning)):
            shape, whole = (len(keys), *shape), functools.partial(_read_stack, names, keys, dtype, read)
        found.append(WholeTensor(prefix + name, dtype, shape, whole))
    return found


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


def _optimizer(adam: Adam, training: TrainingState) -> dict[str, Any]:
    assert training.scheduler
    found: dict[str, Any] = {
        "optimizer": {"param_groups": param_groups(adam, training.scheduler)},
        "param_state_sharding_type": _SHARDING,
    }
    return found | ({"grad_scaler": adam.loss_scale} if adam.loss_scale else {})


def _extra_states(model: ModelConfig, *, local: bool) -> list[str]:
    """Returns the names of the objects: module, number and count of layers. Local layers have those of matrices only."""
    of_layers = ["self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"]
    if not local:
        of_layers.append("self_attention.core_attention")
        of_layers += [f"self_attention.{x}_layernorm" for x in "qk" if model.qk_layernorm]
    assert model.num_layers
    count = model.num_layers
    found = [
        f"decoder.layers.{module}._extra_state/shard_{layer}_{count}" for module in of_layers for layer in range(count)
    ]
    return found if local else [*found, "decoder.final_layernorm._extra_state/shard_0_1"]
