"""The start-up table: each parallel, kernel and numerics feature as requested and as in effect, with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.base.cuda_environment import ALLOCATOR
from megatron.config.features.feature import Facts, Feature, on_or_off
from megatron.config.features.fp8 import fp8_features
from megatron.config.features.memory import memory_features
from megatron.config.features.model import model_features
from megatron.config.features.moe import moe_features
from megatron.config.features.parallel import parallel_features, reduction_features
from megatron.config.rules.needs import notes
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.config.train import TrainConfig


def features(run: RunConfig, settings: RunSettings, facts: Facts) -> list[Feature]:
    """Returns all rows in a fixed order. Pure: nothing is looked up or changed."""
    model, trains = run.model, not run.train.skip_train
    return [
        *parallel_features(run.parallel, model.transformer_impl, settings, facts, trains=trains),
        *moe_features(
            model, run.moe, settings.mesh, hides=run.parallel.overlap_moe_expert_parallel_comm, trains=trains
        ),
        *memory_features(run, settings, facts),
        *reduction_features(settings, facts),
        *fp8_features(run.fp8, model, facts),
        *model_features(model, run.optimizer, run.data.seq_length, facts, trains=trains),
        _predictions(run),
        _chunked_loss(run, settings),
        _z_loss(run.train),
        _cuda_graphs(run.train, facts),
        _allocator(facts),
        _deterministic(run.train, facts),
        *(Feature(note.flag, note.requested, note.in_effect, note.why) for note in (*notes(run), *run.notes)),
    ]


def worth_a_line(rows: Sequence[Feature]) -> list[Feature]:
    """Returns the rows of features that are requested or in effect."""
    return [row for row in rows if (row.requested, row.in_effect) != ("off", "off")]


def format_table(rows: Sequence[Feature]) -> str:
    """Aligned plain text with a header line; no trailing newline."""
    cells = [("feature", "asked", "in effect", "why")]
    cells += [(row.name, row.requested, row.in_effect, row.why) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
    return "\n".join(lines)


def _allocator(facts: Facts) -> Feature:
    name = "CUDA memory allocator"
    if not facts.allocator:
        return Feature(name, "off", "off", "")
    if facts.allocator == ALLOCATOR:
        return Feature(name, "auto", ALLOCATOR, "memory freed by one tensor serves those of any size")
    return Feature(name, facts.allocator, facts.allocator, "set in the environment")


def _predictions(run: RunConfig) -> Feature:
    name, depths = "multi-token prediction", run.model.mtp_num_layers
    if not depths:
        return Feature(name, "off", "off", "")
    requested = f"{depths} further token{'s' if depths > 1 else ''}"
    if run.train.skip_train:
        return Feature(name, requested, "off", "evaluation only")
    fp8 = ", products in bf16" if run.fp8.enabled else ""
    why = f"loss x {run.train.mtp_loss_scaling_factor:g}, on the stage of the head{fp8}"
    return Feature(name, requested, requested, why)


def _z_loss(train: TrainConfig) -> Feature:
    requested = f"{train.z_loss_coeff:g}" if train.z_loss_coeff else "off"
    off = train.skip_train and requested != "off"
    return Feature("z-loss of logits", requested, "off" if off else requested, "evaluation only" if off else "")


def _chunked_loss(run: RunConfig, settings: RunSettings) -> Feature:
    chunk = run.train.cross_entropy_chunk_size
    tokens = (run.data.seq_length or 0) // settings.mesh.cp * (run.train.micro_batch_size or 1)
    if settings.dynamic_context is not None:
        tokens = settings.dynamic_context.tokens
    effect = f"{chunk} tokens" if chunk < tokens else "off"
    return Feature("chunks of head and loss", effect, effect, f"of {tokens} in a microbatch" if chunk < tokens else "")


def _cuda_graphs(train: TrainConfig, facts: Facts) -> Feature:
    name = "CUDA graphs"
    if train.cuda_graph_impl == "none":
        return Feature(name, "off", "off", "")
    if train.skip_train or facts.device != "cuda":
        return Feature(name, "layers", "off", "evaluation only" if train.skip_train else "no CUDA device")
    steps = train.cuda_graph_warmup_steps
    return Feature(name, "layers", "layers", f"after {steps} step{'s' if steps > 1 else ''} without")


def _deterministic(train: TrainConfig, facts: Facts) -> Feature:
    requested = on_or_off(train.deterministic_mode)
    return Feature("deterministic mode", requested, requested, facts.deterministic if train.deterministic_mode else "")
