"""The positions of a rank's parameters in the flat buffers of Megatron-LM's distributed optimizer.

[Note: buffers]
Each chunk of the model has one buffer. Its parameters lie there in the reverse order of the modules, each beginning at
a multiple of 64 elements of its bucket. A bucket is full with the parameter that makes it reach the bucket size; a copy
of an embedding that two stages share has its own bucket. Buckets are padded for the data-parallel ranks; checkpoints
omit that padding: a bucket there ends with its last parameter (core/optimizer/distrib_optimizer.py and
core/distributed/distributed_data_parallel.py of core 0.18).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from megatron.base.errors import CheckpointError
from megatron.core.models.mcore.names import PREDICTION_LAYER

_ALIGNMENT = 64
# The modules of a layer in order, between those of a prediction of a further token; a norm that is stored with the
# following linear layer is a part of that module, or a separate one before the attention or MLP.
_PARTS = (
    "enorm.",
    "hnorm.",
    "eh_proj.",
    "input_layernorm.",
    "self_attention.dt_bias",
    "self_attention.A_log",
    "self_attention.in_proj.layer_norm_",
    "self_attention.in_proj.",
    "self_attention.conv1d.",
    "self_attention.out_norm.",
    "self_attention.out_proj.",
    "self_attention.linear_proj.",
    "self_attention.linear_qkv.layer_norm_",
    "self_attention.linear_qkv.",
    "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.",
    "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.linear_kv_up_proj.layer_norm_",
    "self_attention.linear_kv_up_proj.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "self_attention.kv_layernorm.",
    "pre_mlp_layernorm.",
    "mlp.linear_fc1.layer_norm_",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
    "mlp.router.",
    "mlp.experts.",
    "mlp.shared_experts.",
    "final_layernorm.",
)
_LOCAL_PARTS = ("self_attention.linear_qkv.layer_norm_", *(part for part in _PARTS if "qkv.layer" not in part))
BucketPosition = tuple[int, int]  # (bucket, first element in it)


def in_module_order(names: Collection[str], *, local: bool) -> list[str]:
    """Sorts the names of one layer's parameters, without `decoder.layers.N.` or `mtp.layers.N.`, in the order of
    Megatron-LM's modules.

    `local` selects its own layers (--transformer-impl local) instead of Transformer Engine's. Norms may have the names
    of either.
    """
    parts = _LOCAL_PARTS if local else _PARTS

    def order(name: str) -> tuple[int, list[int], bool]:
        name = name.removeprefix(f"{PREDICTION_LAYER}.")
        part = max((part for part in parts if name.startswith(part)), key=len)
        inside = name.removeprefix(part)  # of experts with the numbers of expert and linear layer, the outer one first
        return parts.index(part), [int(number) for number in re.findall(r"\d+", inside)], inside.endswith("bias")

    return sorted(names, key=order)


def place(numels: Mapping[str, int], buckets: Sequence[int]) -> dict[str, BucketPosition] | None:
    """Returns the positions of parameters, in the order of modules, in buckets of these sizes; None if they do not
    fit."""
    places: dict[str, BucketPosition] = {}
    bucket, end = 0, 0
    for name in reversed(list(numels)):
        start = _aligned(end)
        if bucket < len(buckets) and start + numels[name] > buckets[bucket]:
            if not end <= buckets[bucket] <= start:
                return None
            bucket, start = bucket + 1, 0
        if bucket == len(buckets):
            return None
        places[name] = (bucket, start)
        end = start + numels[name]
    return places if bucket == len(buckets) - 1 and end <= buckets[-1] <= _aligned(end) else None


def bucket_sizes(numels: Mapping[str, int], size: int | None, alone: Collection[str]) -> list[int]:
    """Returns the elements per bucket of a buffer with these parameters, in the order of modules.

    `size` is the number of elements that fills a bucket; None for one bucket. `alone` are parameters with their own
    bucket.
    """
    sizes, end = [], 0
    for name in reversed(list(numels)):
        start = _aligned(end)
        if name in alone and end:
            sizes.append(start)
            start = 0
        end = start + numels[name]
        if name in alone or (size is not None and end >= size):
            sizes.append(end)
            end = 0
    return [*sizes, end] if end else sizes


def default_size(arguments: Mapping[str, object], *, stage: int, chunk: int, parameters: int) -> int | None:
    """Returns Megatron-LM's bucket size for chunk `chunk` of a stage; None for one bucket. Raises CheckpointError."""
    late = bool(arguments.get("overlap_param_gather_with_optimizer_step"))
    if not arguments.get("overlap_grad_reduce") or stage > 0 or chunk > 0 or late:
        return None
    count, bucket_size = arguments.get("ddp_num_buckets"), arguments.get("ddp_bucket_size")
    if isinstance(count, int):
        return parameters // count
    if isinstance(bucket_size, int):
        return bucket_size
    data, context = arguments.get("data_parallel_size"), arguments.get("context_parallel_size", 1)
    if not (isinstance(data, int) and isinstance(context, int)):
        raise CheckpointError(
            "its arguments do not contain data_parallel_size, on which the size of its buckets depends"
        )
    return max(40_000_000, 1_000_000 * data * context)


def _aligned(index: int) -> int:
    return -(-index // _ALIGNMENT) * _ALIGNMENT
