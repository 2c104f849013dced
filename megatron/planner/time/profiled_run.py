"""The run in which a row of a profile was measured: one replica of the model's layers, in the row's layout."""

from __future__ import annotations

import dataclasses

from megatron.config.mesh import mesh_of, smallest_world
from megatron.config.recompute import RecomputeConfig
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings, resolve
from megatron.planner.search.layout import Layout


def run_in(run: RunConfig, layout: Layout, seq_length: int | None = None) -> RunConfig:
    """Returns the run with one microbatch per step in this layout, without recompute. seq_length: default the run's
    own."""
    changed = layout.apply(run)
    return dataclasses.replace(
        changed,
        train=dataclasses.replace(
            changed.train,
            global_batch_size=layout.micro_batch,
            rampup_batch_size=None,
            step_batch_size_schedule=None,
            train_samples=None,
            train_iters=1,
        ),
        data=dataclasses.replace(changed.data, seq_length=seq_length or changed.data.seq_length),
        recompute=RecomputeConfig(),
    )


def settings_in(run: RunConfig) -> RunSettings:
    """Returns the settings of such a run on the fewest ranks."""
    return resolve(run, mesh_of(run.parallel, smallest_world(run.parallel)))
