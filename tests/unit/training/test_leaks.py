"""A run that is dropped leaves nothing behind: a process that builds several runs has memory for each."""

import gc
import weakref

import pytest

from megatron.training.setup import build
from tests import pool
from tests.unit.config.runs import SHORT_RUN, make_run
from tests.unit.models.builds import CPU

SMALL = {**SHORT_RUN, "num_layers": 2, "micro_batch_size": 1, "global_batch_size": 2, "eval_iters": 0}
FEATURES = {
    "plain": {},
    "overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True, "data_parallel_sharding_strategy": "optim"},
    "sharded parameters": {"data_parallel_sharding_strategy": "optim_grads_params"},
    "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "activation offload": {"pipeline_offload_ratio": 1.0},
    "optimizer offload": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0},
    "weight offload": {"cpu_offloading_weights": True, "cpu_offloading_num_layers": 1},
    "CUDA graphs": {"cuda_graph_impl": "local"},
    "experts": {"num_experts": 4, "moe_router_topk": 2, "add_bias_linear": False},
}


@pytest.mark.parametrize("name", FEATURES)
def test_a_dropped_run_is_freed(name):
    trainer = build(make_run(**{**SMALL, **FEATURES[name]}), pool.groups(), CPU)
    for _ in range(2):
        trainer.train_step()
    objects = {
        "trainer": weakref.ref(trainer),
        "model": weakref.ref(next(iter(trainer.parameters.values()))),
        **{f"bucket {bucket.index}": weakref.ref(bucket) for bucket in trainer.data_parallel.buckets},
    }
    del trainer
    gc.collect()
    assert [name for name, reference in objects.items() if reference() is not None] == []
