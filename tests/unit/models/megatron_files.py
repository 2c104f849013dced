"""Folders as Megatron-LM writes them, made by plain slicing and torch.distributed.checkpoint from a model of ours.

A trained model here is a source of weights (test_mcore.FromModel) and its state: our key -> our name -> fp32 tensor.
"""

import argparse
import pickle
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

KEYS = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
# Megatron-LM's own layers, module by module.
_ATTENTION = [f"self_attention.{name}." for name in ("linear_proj", "linear_qkv", "q_layernorm", "k_layernorm")]
_MODULES = ["input_layernorm.", *_ATTENTION, "pre_mlp_layernorm.", "mlp.linear_fc1.", "mlp.linear_fc2."]
LAYER = [module + kind for module in _MODULES for kind in ("weight", "bias")]
FIRST = ["embedding.word_embeddings.weight", "embedding.position_embeddings.weight"]
LAST = ["decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "output_layer.weight"]


class Chunks:
    """A tensor that torch.distributed.checkpoint writes in the pieces that `boxes` (offset, shape) name."""

    def __init__(self, tensor, boxes):
        self.tensor, self.boxes = tensor, boxes

    def __create_write_items__(self, fqn, _):
        properties = TensorProperties.create_from_tensor(self.tensor)
        return [
            WriteItem(
                MetadataIndex(fqn, offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)), properties, self.tensor.size()
                ),
            )
            for offset, shape in self.boxes
        ]

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)) for offset, shape in self.boxes]

    def __get_tensor_shard__(self, index):
        shape = next(shape for offset, shape in self.boxes if torch.Size(offset) == index.offset)
        return self.tensor[tuple(slice(a, a + n) for a, n in zip(index.offset, shape))].clone()


class _Planner(dcp.DefaultSavePlanner):
    """Finds the pieces of Chunks, as Megatron-LM's does."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index):
        held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index) if isinstance(held, Chunks) else super().lookup_object(index)


def halves(tensor):
    """In two pieces along its first dim, and that of the first in two along the last."""
    first, last = max(1, tensor.shape[0] // 2), max(1, tensor.shape[-1] // 2)
    middle = tuple(tensor.shape[1:])
    if tensor.shape[0] == 1 or tensor.shape[-1] == 1:
        return Chunks(tensor, [((0,) * tensor.dim(), tuple(tensor.shape))])
    pieces = [((first, *(0 for _ in middle)), (tensor.shape[0] - first, *middle))]
    if not middle:
        return Chunks(tensor, [((0,), (first,)), *pieces])
    zeros = (0,) * (tensor.dim() - 1)
    pieces.append(((0, *zeros), (first, *middle[:-1], last)))
    pieces.append(((0, *zeros[:-1], last), (first, *middle[:-1], middle[-1] - last)))
    return Chunks(tensor, pieces)


def write_dcp(folder, values):
    """Tensors in several chunks, objects as they are."""
    held = {name: halves(v) if isinstance(v, torch.Tensor) else v for name, v in values.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(held, storage_writer=dcp.FileSystemWriter(folder), planner=_Planner(), no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')


def in_their_shape(model, tensors, padded):
    """Our whole tensors as those of one rank of theirs, with norms named as Transformer Engine's."""
    found = {}
    for name, tensor in tensors.items():
        name = theirs(name)
        if "linear_qkv.weight" in name or "linear_qkv.bias" in name:
            tensor = tensor.flatten(0, 1)
        if "linear_fc1.weight" in name or "linear_fc1.bias" in name:
            tensor = tensor.flatten(0, 1) if model.swiglu else tensor
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            whole = torch.zeros(padded, tensor.shape[1], dtype=tensor.dtype)
            whole[: min(padded, len(tensor))] = tensor[:padded]
            tensor = whole
        found[name] = tensor
    return found


def stacked(tensors):
    """Those of all layers as one with a dim of layers in front."""
    found, layers = {}, {}
    for name, tensor in tensors.items():
        before, _, after = name.partition("decoder.layers.")
        if after:
            number, _, rest = after.partition(".")
            layers.setdefault(f"{before}decoder.layers.{rest}", {})[int(number)] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([each[n] for n in range(len(each))]) for name, each in layers.items()}


def split_gates(tensors):
    """Gate and up as two tensors."""
    found = {}
    for name, tensor in tensors.items():
        if ".linear_fc1.weight" in name or ".linear_fc1.bias" in name:
            found[f"{name}_w"], found[f"{name}_v"] = tensor.chunk(2)
        else:
            found[name] = tensor
    return found


def in_fragments(tensor, rows):
    """Cut into `rows` fragments of its first dim, each flattened."""
    return tensor.reshape(rows, *(1 for _ in tensor.shape[1:]), -1).contiguous()


def rank_order(held, *, engine=False):
    """A rank's parameters of one chunk in the order of Megatron-LM's modules, whatever the names of its norms.

    engine: of Transformer Engine's layers, which have the norms inside.
    """
    layer = list(LAYER)
    if engine:
        for norm, linear in (
            ("input_layernorm.", "self_attention.linear_qkv.w"),
            ("pre_mlp_layernorm.", "mlp.linear_fc1.w"),
        ):
            moved = [name for name in layer if name.startswith(norm)]
            layer = [name for name in layer if name not in moved]
            at = next(number for number, name in enumerate(layer) if name.startswith(linear))
            layer[at:at] = moved
    layers = {int(name.split(".")[2]) for name in held if name.startswith("decoder.layers.")}
    inside = [f"decoder.layers.{number}.{name}" for number in sorted(layers) for name in layer]
    found = [each for name in [*FIRST, *inside, *LAST] for each in (name, theirs(name)) if each in held]
    found = list(dict.fromkeys(found))
    assert len(found) == len(held), held.keys() - set(found)
    return found


def theirs(name):
    """With norms named as Transformer Engine's."""
    for ours, other in NAMES.items():
        name = name.replace(ours, other)
    return name


def buffer_of(held, order, size=None, alone=()):
    """The flat tensors of the buckets that hold `held` ({name: tensor}), last module first, by appending to a list."""
    buckets, current = [], []

    def close():
        buckets.append(torch.cat(current))
        current.clear()

    def length():
        return sum(len(part) for part in current)

    for name in reversed(order):
        current.append(torch.full((-length() % 64,), 7.0))
        if name in alone and length():
            close()
        current.append(held[name].flatten().float())
        if name in alone or (size is not None and length() >= size):
            close()
    if length():
        close()
    return buckets


def common_state(source, iteration=7, schedule=(), **arguments):
    """What is no tensor. schedule: changes of the schedule's state."""
    return {
        "args": argparse.Namespace(**{**source.arguments, **arguments}),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "opt_param_scheduler": {
            "max_lr": 1e-3,
            "lr_warmup_steps": 16,
            "num_steps": 56,
            "lr_decay_style": "cosine",
            "lr_decay_steps": 160,
            "min_lr": 1e-4,
            "start_wd": 0.1,
            "end_wd": 0.1,
            "wd_incr_style": "constant",
            "wd_incr_steps": 160,
            **dict(schedule),
        },
        "num_floating_point_operations_so_far": 1e9,
        "optimizer": {"optimizer": {"param_groups": [{"wd_mult": 1.0, "step": 5}]}},
    }


def rewrite_metadata(folder, change):
    """Change what `.metadata` holds."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def exchange_chunk(folder, name, value):
    """Put what torch.save makes of `value` where the chunks of a tensor are."""
    torch.save(value, folder / "__9_0.distcp")
    size = (folder / "__9_0.distcp").stat().st_size

    def change(metadata):
        for index, place in metadata.storage_data.items():
            if index.fqn == name:
                place.relative_path, place.offset, place.length = "__9_0.distcp", 0, size

    rewrite_metadata(folder, change)
