"""Answers whether a run would start, for a number of ranks and a device that need not be there."""

from __future__ import annotations

import dataclasses
import os
import resource

from megatron.base.errors import ConfigError, UserError
from megatron.base.log import get_logger, muted
from megatron.config.features.feature import Note
from megatron.config.mesh import mesh_of
from megatron.config.rules.check import check_vocabulary
from megatron.config.run import RunConfig
from megatron.config.settings import resolve
from megatron.core.datasets.tokenizer import build_tokenizer
from megatron.core.streams.simulated import H100, AssumedDevice
from megatron.planner.memory.plan import plan_memory
from megatron.spec.sizes import FUSED_GPU
from megatron.training.dry_run.report import GB, MIB, rank_lines, verdict
from megatron.training.dry_run.trace import shortened, trace

log = get_logger(__name__)


def dry_run(run: RunConfig, world_size: int) -> None:
    """Traces the first step of the first rank and of the last one, which is in the last stage, and logs their cost.

    Raises UserErrors: those of the run, and one if the device's memory would be too small.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing may open a context on a GPU of this machine
    assumed = H100
    run = _settled(run)
    mesh, short = mesh_of(run.parallel, world_size), shortened(run, world_size)
    settings, short_settings = resolve(run, mesh), resolve(short, mesh)
    whole, planned = plan_memory(run, settings, FUSED_GPU), plan_memory(short, short_settings, FUSED_GPU)
    microbatches = short_settings.batches.final_num_microbatches, settings.batches.final_num_microbatches
    short = dataclasses.replace(short, notes=(*short.notes, _note(world_size, assumed, microbatches)))
    needed, worst = 0, 0
    for number, rank in enumerate(dict.fromkeys((0, world_size - 1))):
        with muted(number > 0):  # the start-up table is the same
            traced = trace(short, world_size, rank, assumed)
        stage = traced.stage
        for line in rank_lines(traced, planned[stage], microbatches, world_size):
            log.info("%s", line)
        most = max(traced.set_up, traced.peak + whole[stage].peak - planned[stage].peak)
        if most > needed:
            needed, worst = most, rank
    log.info(
        "peak host memory of this dry run: %.0f MiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB
    )
    if needed > assumed.memory:
        raise UserError(
            f"rank {worst} would run out of memory: it needs {needed / GB:.1f} GB, and an {assumed.name} has "
            f"{assumed.memory / GB:.0f} GB; reduce sizes or batches, or use more ranks"
        )
    log.info("%s", verdict(needed, assumed))


def _settled(run: RunConfig) -> RunConfig:
    """Returns the run as its files would complete it. Raises ConfigError for a run that cannot be traced."""
    if run.parallel.device == "cpu":
        raise ConfigError("--dry-run traces runs on CUDA devices, not --device cpu; remove one of them")
    if run.model.lora_rank:
        raise ConfigError(f"--dry-run traces no adapters; remove it, or --lora-rank {run.model.lora_rank}")
    size = run.model.vocab_size or build_tokenizer(run.tokenizer, None).vocab_size
    positions = run.model.max_position_embeddings or run.data.seq_length
    model = dataclasses.replace(run.model, vocab_size=size, max_position_embeddings=positions)
    check_vocabulary(model, run.parallel.tensor_model_parallel_size, size)
    return dataclasses.replace(run, model=model)


def _note(world_size: int, assumed: AssumedDevice, microbatches: tuple[int, int]) -> Note:
    """The row of the start-up table. microbatches: that are traced, and of a step of the run."""
    cluster = f"{world_size} x {assumed.name}, {assumed.memory / GB:.0f} GB, assumed"
    traced, of_step = microbatches
    fewer = "" if traced == of_step else f"; {traced} of {of_step} microbatches per step are traced, also in this table"
    return Note("--dry-run", "on", cluster, f"no device is used, and no other rank is asked{fewer}")
