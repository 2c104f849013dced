"""The mesh of a command line's sizes."""

from megatron.config.mesh import mesh_of, smallest_world
from megatron.config.parallel import ParallelConfig


def test_the_smallest_world_is_one_replica():
    parallel = ParallelConfig(tensor_model_parallel_size=4, context_parallel_size=3, pipeline_model_parallel_size=2)
    assert smallest_world(parallel) == 24
    mesh = mesh_of(parallel, smallest_world(parallel))
    assert (mesh.tp, mesh.cp, mesh.dp, mesh.pp) == (4, 3, 1, 2)


def test_the_smallest_world_holds_whole_replicas_of_dense_layers_and_of_experts():
    def smallest(**sizes):
        return smallest_world(ParallelConfig(**sizes))

    assert smallest(expert_model_parallel_size=4, pipeline_model_parallel_size=2) == 8
    assert smallest(tensor_model_parallel_size=2, expert_model_parallel_size=4) == 8
    folded = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "expert_tensor_parallel_size": 1}
    assert smallest(**folded, expert_model_parallel_size=4) == 4
    assert smallest(**folded, expert_model_parallel_size=3) == 12
