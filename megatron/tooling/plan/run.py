"""Reads the flags of a run that is to be planned."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.command_line.read import parse
from megatron.config.mesh import mesh_of, smallest_world
from megatron.config.rules.check import check, check_vocabulary
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings, resolve
from megatron.core.datasets.tokenizer import build_tokenizer


def settings_of(flags: Sequence[str], world_size: int | None, *, description: str) -> tuple[RunConfig, RunSettings]:
    """Returns the run with these flags, with its vocabulary, and its settings.

    world_size: None for the fewest processes of the layout. Raises UserErrors, also for flags that the run would reject.
    """
    run = parse(flags, description=description)
    parallel = run.parallel
    world_size = smallest_world(parallel) if world_size is None else world_size
    check(run, world_size)
    if run.model.vocab_size is None:
        size = build_tokenizer(run.tokenizer, None).vocab_size
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=size))
    assert run.model.vocab_size
    check_vocabulary(run.model, parallel.tensor_model_parallel_size, run.model.vocab_size)
    return run, resolve(run, mesh_of(parallel, world_size))
