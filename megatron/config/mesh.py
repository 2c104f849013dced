"""Converts sizes on the command line to the mesh of a job."""

from __future__ import annotations

import math

from megatron.base.mesh import Mesh
from megatron.config.parallel import ParallelConfig


def mesh_of(parallel: ParallelConfig, world_size: int) -> Mesh:
    """Returns the mesh of `world_size` processes. Raises ConfigError if the sizes do not divide it."""
    return Mesh.create(
        world_size,
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_parallel_size,
    )


def smallest_world(parallel: ParallelConfig) -> int:
    """Returns the fewest processes that the layout allows: whole replicas of the dense layers and of the experts."""
    tp = parallel.tensor_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or tp
    stage = math.lcm(tp * parallel.context_parallel_size, etp * parallel.expert_model_parallel_size)
    return stage * parallel.pipeline_model_parallel_size
