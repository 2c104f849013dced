"""The share of a job's processes that train under --elastic-world, where the number of hosts changes between attempts.

[Note: elastic world]
The layout of a replica (tp, cp, pp, ep, etp) and the samples of every step stay; the number of replicas changes. A step
can only be divided among some numbers of replicas, and torchrun would end a job whose ranks refuse their number. So
there is a rule with an answer for every number of processes that holds one replica:

1. As many whole replicas train as the processes allow and every batch of the run can be divided among. The processes
   left over wait as spares, and the next attempt counts anew.
2. The micro batch is the largest divisor of --micro-batch-size with which each replica has whole microbatches.

Both follow from the flags and the world size alone, so all ranks agree without a word.
"""

from __future__ import annotations

import dataclasses
import math

from megatron.config.features.feature import Note
from megatron.config.mesh import mesh_of, smallest_world
from megatron.config.run import RunConfig
from megatron.config.train import parse_steps

FLAG = "--elastic-world"


def training_world(run: RunConfig, world_size: int) -> int:
    """Returns how many of `world_size` processes train, from rank 0 on; all of them without --elastic-world.

    All of them, too, if they do not hold one replica: then the rules of the layout say so.
    """
    replica = smallest_world(run.parallel)
    if not run.parallel.elastic_world or replica < 1:
        return world_size
    batch = _common_batch(run)
    samples_together = max(1, run.rl.grpo_group_size) if run.data.perform_rl_step else 1
    instances = max(1, run.parallel.num_distributed_optimizer_instances)
    for size in range(world_size // replica * replica, 0, -replica):
        mesh = mesh_of(run.parallel, size)
        divides = batch % (mesh.dp * samples_together) == 0
        if divides and mesh.dp * mesh.cp % instances == 0 and mesh.edp % instances == 0:
            return size
    return world_size


def fitted(run: RunConfig, world_size: int) -> RunConfig:
    """Returns the run as `world_size` processes train it: its micro batch, and a row of the start-up table for each
    change. The run itself without --elastic-world."""
    micro_batch, size = run.train.micro_batch_size, training_world(run, world_size)
    replica = smallest_world(run.parallel)
    if not run.parallel.elastic_world or not micro_batch or replica < 1 or size % replica:
        return run
    dp = mesh_of(run.parallel, size).dp
    fitting = math.gcd(micro_batch, _common_batch(run) // dp)
    rows = []
    if size != world_size:
        why = f"a step cannot be divided among more replicas than {dp}; {world_size - size} wait"
        rows.append(Note(FLAG, f"{world_size} processes", f"{size} processes", why))
    if fitting != micro_batch:
        why = f"the largest divisor with whole microbatches on {dp} replicas"
        rows.append(Note("--micro-batch-size", str(micro_batch), str(fitting), why))
    train = dataclasses.replace(run.train, micro_batch_size=fitting)
    return dataclasses.replace(run, train=train, notes=(*run.notes, *rows))


def _common_batch(run: RunConfig) -> int:
    """Returns the number that replicas times micro batch must divide: of all batch sizes of the run."""
    train = run.train
    sizes = [train.global_batch_size or 0, *(train.rampup_batch_size or ())[:2]]
    if train.step_batch_size_schedule is not None:
        sizes += [size for _, size in parse_steps(train.step_batch_size_schedule, run.data.seq_length)]
    return math.gcd(*sizes)
