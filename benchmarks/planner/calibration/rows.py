"""Runs of any framework as rows of a table: each one is turned into flags, a cluster and a framework.

The columns are those of calibration.csv. What a row leaves open (micro batch, virtual stages, kind of
context parallelism) is chosen as a careful user would: the fastest that fits into memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.planner.calibration.framework import (
    FLASH,
    FLASH_1,
    FLASH_3,
    FUSED_SOFTMAX,
    TORCH,
    UNFUSED,
    Framework,
)
from megatron.base.errors import ConfigError, shown
from megatron.base.mesh import Mesh
from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.data import DataConfig
from megatron.config.interval import LAYERS, SIZE, SIZE_OR_NONE
from megatron.config.mesh import mesh_of
from megatron.config.model import ModelConfig
from megatron.config.moe_training import MoEConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.recompute import FULL, RECOMPUTE_MODULES, SELECTIVE, UNIFORM, RecomputeConfig
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings, resolve
from megatron.config.train import TrainConfig
from megatron.planner.time.hardware import GB, PRECISIONS, Cluster, built_in

Row = Mapping[str, str]


@dataclass(frozen=True)
class LatentSizes:
    """Channels of the latents of queries, of keys and values; of a head those that are rotated, and of values."""

    queries: int
    keys_and_values: int
    rotated: int
    values: int


_SHARDINGS = {"zero1": "optim", "zero2": "optim_grads", "fsdp": "optim_grads_params", "none": "no_shard"}
_MICRO_BATCHES = (1, 2, 4, 8)
_MOST_VIRTUAL = 6  # virtual stages of a row that does not say
# Names of devices in tables -> ours.
_DEVICES = {"A100-80GB": "a100", "A100-40GB": "a100-40", "H100 96GB HBM2e 500W": "h100-500w"}
_ATTENTION = {
    "FA1": FLASH_1,
    "FA2": FLASH,
    "own": FLASH,
    "cuDNN/FA2": FLASH,
    "SDPA": TORCH,
    "unfused": UNFUSED,
    "unfused, fused softmax": FUSED_SOFTMAX,
}
# Frameworks whose kernels of norms, rotary embedding, activation and loss are those of plain torch. They also keep
# weight gradients in bf16, sum them in fp32 by an all-reduce of whole gradients, gather the logits for the loss, gather
# the output of a norm once, and count the embedding, the final norm and the head as layers when they share out those.
_PLAIN = ("aleph-alpha", "aleph-alpha, fused RMSNorm")
# Frameworks whose tensor parallelism does not overlap the communication of a column-parallel layer's backward.
_NO_BULK_OVERLAP = (*_PLAIN, "megatron-2021", "torchtitan")
# Frameworks whose context parallelism gathers keys and values.
_GATHERS_KEYS = ("olmo", "meta", "torchtitan")
# With a pipeline these keep whole parameters during a step, and sum gradients once, whatever the sharding is called.
_WHOLE_IN_PIPELINE = ("torchtitan", "meta")
# Megatron-LM and NeMo before their fused loss was the default.
_UNFUSED_LOSS = ("megatron-lm-2021", "megatron-lm-2022", "megatron-lm-r0.8", "nemo-24", "nemo-long-seq")
# Frameworks whose weight gradients are added to their sums by a kernel of its own.
_SEPARATE_SUMS = (*_PLAIN, "torchtitan", "olmo")
# Frameworks whose gated MLP has two column-parallel layers.
_SPLIT_GATE = (*_PLAIN, "torchtitan")
# Frameworks on torch's FSDP, which copies parameters and gradients around its collectives.
_COPIES = ("torchtitan", "olmo")
# Sources whose recipes send gradients in bf16.
_HALF_ON_WIRE = ("nemo", "bridge")
# Sources of 2025, whose cuDNN has attention for Hopper's asynchronous units.
_THIRD = ("bridge", "megatron-lm-llama-fp8", "megatron-lm-moe")
_FUSED_SOFTMAX_ALWAYS = ("megatron-2021",)
_STACKS = (*_PLAIN, *_COPIES, "meta", "megatron", "megatron-2021", "colossal")
_GBIT = re.compile(r"(\d{1,6})x(\d{1,6}) Gb/s( InfiniBand| RoCE)?")
_USUAL_NETWORK = re.compile(r"(NVLink domain of .*)?")  # no count and rate of a node
_UNSTATED = re.compile(r"(none|unstated)\b.*")  # a table says how likely its guess is
_EVERY_SECOND_PRODUCT = "selective (op)"
_KNOWN = {  # what a row may say
    "stack": ("", *_STACKS),
    "attention": ("", *_ATTENTION),
    "sequence_parallel": ("", "0", "1"),
    "gated_mlp": ("0", "1"),
    "tied_embedding": ("0", "1"),
    "dp_sharding": tuple(_SHARDINGS),
    "precision": PRECISIONS,
}
# Columns that are planned; and those that only say where a row comes from, and what was measured.
_COLUMNS = """
    gpu gpus_per_node network_of_a_node model layers hidden ffn heads kv_heads head_dim vocab gated_mlp tied_embedding
    experts experts_per_token expert_ffn shared_expert_ffn dense_layers mtp_layers seq gpus global_batch micro_batch
    tp pp virtual_stages cp ep dp_sharding sequence_parallel precision attention recompute offload_ratio stack overlap
    source note id use dp status tokens_per_s_per_gpu peak_memory_GB mfu_own tflops_published tflops_convention
    quality
"""
_ENDS = 3  # embedding, final norm, head
# Models with latent attention: what their columns leave out. head_dim is that of queries and keys.
_LATENTS = {"DeepSeekV3": LatentSizes(queries=1536, keys_and_values=512, rotated=64, values=128)}
_OVERLAPS = ("dp", "tp", "moe")
_DIGITS = 30  # of a number that is read


@dataclass(frozen=True)
class Planned:
    """A run that can be planned."""

    run: RunConfig
    settings: RunSettings
    cluster: Cluster
    framework: Framework


def candidates(row: Row) -> list[Planned]:
    """Returns the runs that a row may describe, several where it leaves sizes open.

    Raises ConfigError if it cannot be planned.
    """
    _check_words(row)
    _check_sizes(row)
    cluster, framework = _cluster(row), _framework(row)
    found: list[Planned] = []
    problem: ConfigError | None = None
    for micro_batch, virtual, kind in itertools.product(
        _micro_batches(row), _virtual_stages(row), _context(row, cluster)
    ):
        run = _run(row, micro_batch, virtual, kind)
        try:
            mesh = mesh_of(run.parallel, _whole(row, "gpus"))
            _check_batch(row, mesh, micro_batch)
            found.append(Planned(run, resolve(run, mesh), cluster, framework))
        except ConfigError as error:
            problem = error
    if not found:
        assert problem is not None
        raise problem
    return found


def _check_words(row: Row) -> None:
    """Raises ConfigError for what a row says and no plan would follow."""
    if unknown := [name for name, text in row.items() if text and name not in _COLUMNS.split()]:
        raise ConfigError(
            f"column {unknown[0]} is not planned; remove it, or leave it empty in rows that do without it"
        )
    for name, known in _KNOWN.items():
        if row[name] not in known:
            raise ConfigError(f"{name} {shown(row[name])} is none of {', '.join(filter(None, known))}")
    if not set(row["overlap"].split(",")) <= {"", *_OVERLAPS}:
        raise ConfigError(f"overlap {shown(row['overlap'])} is no list of {', '.join(_OVERLAPS)}")
    if "DeepSeek" in row["model"] and row["model"] not in _LATENTS:
        raise ConfigError(
            f"{shown(row['model'])} has latent attention, whose sizes are known of {', '.join(_LATENTS)} only"
        )
    network = row["network_of_a_node"]
    if not (_GBIT.fullmatch(network) or _USUAL_NETWORK.fullmatch(network)):
        raise ConfigError(
            f"network_of_a_node {shown(network)} is not like 8x400 Gb/s InfiniBand; leave it empty if unknown"
        )


def _check_sizes(row: Row) -> None:
    """Raises ConfigError for sizes that the layers cannot have on tp ranks."""
    if not LAYERS.holds(_whole(row, "layers")):
        raise ConfigError(f"layers {row['layers']} must be {LAYERS.words}")
    tp, heads, groups = _whole(row, "tp"), _whole(row, "heads"), _whole(row, "kv_heads")
    for name, size, parts, of in (
        ("heads", heads, groups, f"kv_heads {groups}"),
        ("heads", heads, tp, f"tp {tp}"),
        ("kv_heads", max(groups, tp), min(groups, tp), f"tp {tp}, nor a divisor"),
        ("ffn", _whole(row, "ffn"), tp, f"tp {tp}"),
    ):
        if size % parts:
            raise ConfigError(f"{name} {row[name]} is not a multiple of {of}; change one of them")
    experts = _whole(row, "experts", 0)
    if experts and (experts % _whole(row, "ep", 1) or _whole(row, "experts_per_token") > experts):
        raise ConfigError(
            f"experts {experts} must be a multiple of ep {row['ep']} and not fewer than experts_per_token "
            f"{row['experts_per_token']}"
        )
    latents = _LATENTS.get(row["model"])
    if latents is not None and (groups != heads or _whole(row, "head_dim") <= latents.rotated):
        raise ConfigError(
            f"latent attention of {row['model']} has as many kv_heads as heads, and a head_dim above its "
            f"{latents.rotated} rotated channels, not {groups} of {heads} heads and head_dim {row['head_dim']}"
        )
    if _whole(row, "dense_layers", 0) > _whole(row, "layers"):
        raise ConfigError(f"dense_layers {row['dense_layers']} are more than layers {row['layers']}")


def _check_batch(row: Row, mesh: Mesh, micro_batch: int) -> None:
    batch = _whole(row, "global_batch")
    if batch % (micro_batch * mesh.dp):
        raise ConfigError(f"global_batch {batch} is not a multiple of micro_batch {micro_batch} x dp {mesh.dp}")


def _context(row: Row, cluster: Cluster) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """How attention reaches the whole sequence, and its sizes for exchanges in a node and rings between nodes."""
    if row["stack"] in _GATHERS_KEYS:
        yield "all_gather", None
        return
    yield "p2p", None
    cp, tp = _whole(row, "cp", 1), _whole(row, "tp")
    inner = cluster.node // tp
    if cp > inner > 1 and cp % inner == 0 and _whole(row, "heads") // tp % inner == 0:
        yield "a2a+p2p", (inner, cp // inner)


def _run(row: Row, micro_batch: int, virtual: int, context: tuple[str, tuple[int, int] | None]) -> RunConfig:
    layers, p, seq, further = _whole(row, "layers"), _whole(row, "pp"), _whole(row, "seq"), _whole(row, "mtp_layers", 0)
    ends, layout = _pipeline_split(row["stack"], layers, p * virtual, further)
    overlap, bulk_overlap = row["overlap"].split(","), row["stack"] not in _NO_BULK_OVERLAP
    shards = _SHARDINGS[row["dp_sharding"]]
    if p > 1 and row["stack"] in _WHOLE_IN_PIPELINE:
        shards = "optim"
    parallel = ParallelConfig(
        tensor_model_parallel_size=_whole(row, "tp"),
        sequence_parallel=row["sequence_parallel"] == "1",
        tp_comm_overlap="tp" in overlap,
        tp_comm_bulk_dgrad=bulk_overlap,
        tp_comm_bulk_wgrad=bulk_overlap,
        pipeline_model_parallel_size=p,
        num_virtual_stages_per_pipeline_rank=virtual if virtual > 1 else None,
        pipeline_model_parallel_layout=layout,
        account_for_embedding_in_pipeline_split=ends,
        account_for_loss_in_pipeline_split=ends,
        context_parallel_size=_whole(row, "cp", 1),
        cp_comm_type=(context[0],),
        hierarchical_context_parallel_sizes=context[1],
        expert_model_parallel_size=_whole(row, "ep", 1),
        expert_tensor_parallel_size=1 if row["experts"] else None,
        data_parallel_sharding_strategy=shards,
        overlap_grad_reduce="dp" in overlap,
        overlap_moe_expert_parallel_comm="moe" in overlap,
        overlap_param_gather="dp" in overlap and row["dp_sharding"] != "none",
    )
    return RunConfig(
        model=_model(row),
        moe=MoEConfig(moe_router_force_load_balancing=bool(row["experts"])),
        parallel=parallel,
        recompute=_recompute(row["recompute"]),
        activation_offload=ActivationOffloadConfig(pipeline_offload_ratio=_offload_ratio(row)),
        data=DataConfig(seq_length=seq),
        train=TrainConfig(
            micro_batch_size=micro_batch,
            global_batch_size=_whole(row, "global_batch"),
            cross_entropy_chunk_size=micro_batch * seq,
        ),
    )


def _recompute(text: str) -> RecomputeConfig:
    """What layers recompute. Every second product is a property of the framework, see `_framework`."""
    if text == _EVERY_SECOND_PRODUCT or _UNSTATED.fullmatch(text):
        return RecomputeConfig()
    if text == FULL:
        return RecomputeConfig(recompute_granularity=FULL, recompute_method=UNIFORM, recompute_num_layers=1)
    modules = tuple(text.split("+"))
    if not set(modules) <= set(RECOMPUTE_MODULES):
        raise ConfigError(
            f"recompute {shown(text)} is not planned; give none, full, {_EVERY_SECOND_PRODUCT}, or parts joined by +: "
            f"{', '.join(RECOMPUTE_MODULES)}"
        )
    return RecomputeConfig(recompute_granularity=SELECTIVE, recompute_modules=modules)


def _offload_ratio(row: Row) -> str | None:
    """The part of the activations in host memory, of a framework that keeps what this project keeps."""
    text = row.get("offload_ratio") or "0"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ConfigError(f"offload_ratio {shown(text)} must be a number from 0 to 1")
    if ratio and row["stack"] in _PLAIN:
        raise ConfigError(f"offload_ratio {text} is not planned for the kernels of {row['stack']}; leave it empty")
    return text if ratio else None


def _pipeline_split(stack: str, layers: int, stages: int, further: int) -> tuple[bool, str | None]:
    """Returns (whether embedding and loss take the place of a layer each, the layout where no flag describes it).

    further: layers that predict further tokens, in the last stage. Layers that the stages do not divide are shared out
    as evenly as possible, the first and the last stage among those with fewer.
    """
    if stages == 1:
        return False, None
    if further:
        if layers < stages - 1:
            raise ConfigError(f"{layers} layers are fewer than {stages} pipeline stages; lower pp or virtual_stages")
        return False, _layout(_counted_with_predictions(layers, stages, further), further)
    if stack not in _PLAIN and layers % stages == 0:
        return False, None
    if stack not in _PLAIN and (layers + 2) % stages == 0:
        return True, None
    if layers < stages:
        raise ConfigError(f"{layers} layers are fewer than {stages} pipeline stages; lower pp or virtual_stages")
    if stack in _PLAIN:
        return False, _layout(_counted_with_ends(layers, stages))
    fewer, more = divmod(layers, stages)
    counts = [fewer] * stages
    for number in range(more):
        counts[(stages - more + 1) // 2 + number] += 1
    return False, _layout(counts)


def _counted_with_ends(layers: int, stages: int) -> list[int]:
    """Layers of each stage where embedding, final norm and head count as a layer each, and the first stages have
    more."""
    fewer, more = divmod(layers + _ENDS, stages)
    items = itertools.accumulate(fewer + (number < more) for number in range(stages))
    until = [min(item - 1, layers) for item in items]  # the first item is the embedding
    return [end - start for start, end in itertools.pairwise((0, *until))]


def _counted_with_predictions(layers: int, stages: int, further: int) -> list[int]:
    """Layers of each stage where the loss counts as a layer in the last one, and each prediction as two: its layer and
    its loss."""
    last = max(0, -(-(layers + 2 * further + 1) // stages) - 2 * further - 1)
    fewer, more = divmod(layers - last, stages - 1)
    return [*[fewer] * (stages - 1 - more), *[fewer + 1] * more, last]


def _layout(counts: Sequence[int], further: int = 0) -> str:
    return "E" + "|".join(f"t*{count}" if count else "" for count in counts) + "m" * further + "L"


def _model(row: Row) -> ModelConfig:
    heads, groups, layers = _whole(row, "heads"), _whole(row, "kv_heads"), _whole(row, "layers")
    gated, experts = row["gated_mlp"] == "1", _whole(row, "experts", 0)
    model = ModelConfig(
        num_layers=layers,
        hidden_size=_whole(row, "hidden"),
        ffn_hidden_size=_whole(row, "ffn"),
        num_attention_heads=heads,
        kv_channels=_whole(row, "head_dim"),
        group_query_attention=groups != heads,
        num_query_groups=groups if groups != heads else None,
        vocab_size=_whole(row, "vocab"),
        untie_embeddings_and_output_weights=row["tied_embedding"] != "1",
        swiglu=gated,
        normalization="RMSNorm" if gated else "LayerNorm",
        position_embedding_type="rope" if gated else "learned_absolute",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        attention_backend="unfused" if row["attention"].startswith("unfused") else "auto",
    )
    if (latents := _LATENTS.get(row["model"])) is not None:
        model = dataclasses.replace(
            model,
            kv_channels=None,
            multi_latent_attention=True,
            q_lora_rank=latents.queries,
            kv_lora_rank=latents.keys_and_values,
            qk_head_dim=_whole(row, "head_dim") - latents.rotated,
            qk_pos_emb_head_dim=latents.rotated,
            v_head_dim=latents.values,
            qk_layernorm=True,
        )
    model = dataclasses.replace(model, mtp_num_layers=_whole(row, "mtp_layers", 0))
    if not experts:
        return model
    dense = _whole(row, "dense_layers", 0)
    return dataclasses.replace(
        model,
        num_experts=experts,
        moe_router_topk=_whole(row, "experts_per_token"),
        moe_ffn_hidden_size=_whole(row, "expert_ffn"),
        moe_shared_expert_intermediate_size=_whole(row, "shared_expert_ffn", 0) or None,
        moe_layer_freq=f"([0]*{dense}+[1]*{layers - dense})",
    )


def _framework(row: Row) -> Framework:
    stack, precision = row["stack"], row["precision"]
    attention = _ATTENTION.get(row["attention"], FLASH)
    if attention == FLASH and row["source"].startswith(_THIRD):
        attention = FLASH_3
    if attention == UNFUSED and stack in _FUSED_SOFTMAX_ALWAYS:
        attention = FUSED_SOFTMAX
    plain = stack in _PLAIN or row["note"].startswith("eager")
    return Framework(
        precision=precision,
        attention=attention,
        fused_norm=not plain or "fused RMSNorm" in stack,
        fused_pointwise=not plain,
        fused_loss=not plain and not row["source"].startswith(_UNFUSED_LOSS),
        fused_accumulation=stack not in _SEPARATE_SUMS,
        split_gate=stack in _SPLIT_GATE,
        keeps_gathered=stack in _PLAIN,
        copies_sharded=stack in _COPIES,
        half_on_wire=row["source"].startswith(_HALF_ON_WIRE),
        half_gradients=stack in _PLAIN,
        whole_sums=stack in _PLAIN,
        gathered_loss=stack in _PLAIN,
        whole_logits=True,
        blocking_pipeline=_whole(row, "virtual_stages", 1) == 1,
        recompute_half=row["recompute"] == _EVERY_SECOND_PRODUCT,
    )


def _cluster(row: Row) -> Cluster:
    """The table's network, where it gives one."""
    device = row["gpu"]
    cluster = dataclasses.replace(built_in(_DEVICES.get(device, device.lower())), node=_whole(row, "gpus_per_node"))
    found = _GBIT.fullmatch(row["network_of_a_node"])
    if found is None or 0 in (int(found.group(1)), int(found.group(2))):
        return cluster
    count, rate = int(found.group(1)), int(found.group(2))
    return dataclasses.replace(cluster, network=count * rate / 8 * GB / cluster.node)


def _micro_batches(row: Row) -> Iterator[int]:
    given = _whole(row, "micro_batch", 0)
    yield from (given,) if given else _MICRO_BATCHES


def _virtual_stages(row: Row) -> Iterator[int]:
    given, layers, p = _whole(row, "virtual_stages", 0), _whole(row, "layers"), _whole(row, "pp")
    if given or p == 1:
        yield given or 1
        return
    divide = [number for number in range(1, min(layers // p, _MOST_VIRTUAL) + 1) if layers % (p * number) == 0]
    yield from dict.fromkeys((divide[0], divide[-1]) if divide else (1,))


def _whole(row: Row, column: str, default: int | None = None) -> int:
    """A whole number of a column, above 0 unless the default is 0; the default where it is empty. Raises
    ConfigError."""
    text = row.get(column) or ""
    if not text and default is not None:
        return default
    interval = SIZE_OR_NONE if default == 0 else SIZE
    if not text.isdecimal() or len(text) > _DIGITS or not interval.holds(int(text)):
        raise ConfigError(f"{column} of a row must be a whole number {interval.words}, not {shown(text)}")
    return int(text)


def number(row: Row, column: str) -> float:
    """A number above 0 of a column. Raises ConfigError."""
    try:
        value = float(row[column])
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ConfigError(f"{column} of row {row.get('id', '')} must be a number above 0, not {row[column]!r}")
    return value
