"""Reads the flags of a run that is to be planned."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.base.errors import ConfigError
from megatron.command_line.read import parse
from megatron.config.fp8 import MXFP8 as MXFP8_RECIPE
from megatron.config.mesh import mesh_of, smallest_world
from megatron.config.rules.check import check, check_vocabulary
from megatron.config.rules.model import shape_is_given
from megatron.config.run import RunConfig, with_batch_of_answers
from megatron.config.settings import RunSettings, resolve
from megatron.core.datasets.tokenizer import build_tokenizer
from megatron.planner.time.hardware import BF16, FP8, MXFP8
from megatron.planner.time.software import Software
from megatron.spec.sizes import FUSED_GPU, Target


def settings_of(flags: Sequence[str], world_size: int | None, *, description: str) -> tuple[RunConfig, RunSettings]:
    """Returns the run with these flags, with its vocabulary, and its settings.

    world_size: None for the fewest processes of the layout. Raises UserErrors, also for flags that the run would
    reject.
    """
    run = with_batch_of_answers(parse(flags, description=description))
    parallel = run.parallel
    world_size = smallest_world(parallel) if world_size is None else world_size
    check(run, world_size)
    check_shape(run)
    run = with_vocabulary(run)
    assert run.model.vocab_size
    check_vocabulary(run.model, parallel.tensor_model_parallel_size, run.model.vocab_size)
    return run, resolve(run, mesh_of(parallel, world_size))


def check_shape(run: RunConfig) -> None:
    """Raises ConfigError for a run whose model only a checkpoint or a Hugging Face model says: neither is read."""
    if problem := shape_is_given(run.model):
        raise ConfigError(f"{problem}: no checkpoint and no Hugging Face model is read here")


def with_vocabulary(run: RunConfig) -> RunConfig:
    """Returns the run with the size of its vocabulary, which its tokenizer knows if no flag says it. Raises
    UserErrors."""
    if run.model.vocab_size is not None:
        return run
    if run.tokenizer.tokenizer_type is None:
        raise ConfigError(
            "the size of the vocabulary is not known; give --vocab-size, or --tokenizer-type and its files"
        )
    size = build_tokenizer(run.tokenizer, None).vocab_size
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=size))


def software_of(run: RunConfig) -> Software:
    """Returns the properties of the kernels that a run uses."""
    precision = BF16
    if run.fp8.enabled:
        precision = MXFP8 if run.fp8.fp8_recipe == MXFP8_RECIPE else FP8
    return Software(precision=precision, unfused_attention=run.model.attention_backend == "unfused")


def target_of(run: RunConfig, *, multiplies_halves: bool = False) -> Target:
    """Returns the device of a run. multiplies_halves: its CPU, if it is one, has instructions for bf16 and fp16."""
    cpu = run.parallel.device == "cpu"
    if not cpu:
        return FUSED_GPU
    return Target(cpu, wide=run.model.dtype_name != "float32" and not multiplies_halves)
