"""The mesh of a command line's sizes."""

from megatron.config.mesh import mesh_of, smallest_world
from megatron.config.parallel import ParallelConfig


def test_the_smallest_world_is_one_replica():
    parallel = ParallelConfig(tensor_model_parallel_size=4, context_parallel_size=3, pipeline_model_parallel_size=2)
    assert smallest_world(parallel) == 24
    mesh = mesh_of(parallel, smallest_world(parallel))
    assert (mesh.tp, mesh.cp, mesh.dp, mesh.pp) == (4, 3, 1, 2)
