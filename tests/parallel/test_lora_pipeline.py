"""Adapters under pipelines with a stage in which nothing is trained: the frozen embedding alone."""

import pytest

from megatron.training.checkpoint import save_checkpoint
from tests import pool
from tests.parallel.test_pipeline_checkpoints import CLOSE, OVERLAPPED, built, pipeline

LORA = {"lora_rank": 2, "lora_alpha": 4.0, "finetune": True, "untie_embeddings_and_output_weights": True, "lr": 1e-2}
STEPS = 4  # --grad-reduce-mode auto decides in the third
ALONE, IN_V = "E|ttttttttL", "E|ttt|tttt|tL"
BALANCED = {"recompute_policy": "balanced", "activation_memory_budget": 1.0}
FAR = {"optimizer_cpu_offload": True, "optimizer_offload_chunk_size": 1024}
# World size and fields.
LAYOUTS = {
    "1f1b": (2, pipeline(2, "1f1b", pipeline_model_parallel_layout=ALONE)),
    "zb-h1": (2, pipeline(2, "zb-h1", pipeline_model_parallel_layout=ALONE)),
    "zb-v": (2, pipeline(2, "zb-v", pipeline_model_parallel_layout=IN_V)),
    "zb-h1, updates in host memory": (2, pipeline(2, "zb-h1", pipeline_model_parallel_layout=ALONE, **FAR)),
    "1f1b, balanced recompute": (2, pipeline(2, "1f1b", pipeline_model_parallel_layout=ALONE, **BALANCED)),
    "dp 2, 1f1b, overlapped": (4, pipeline(2, "1f1b", pipeline_model_parallel_layout=ALONE, **OVERLAPPED)),
    "dp 2, zb-h1, overlapped": (4, pipeline(2, "zb-h1", pipeline_model_parallel_layout=ALONE, **OVERLAPPED)),
}


def save_base(rank, size, folder):
    save_checkpoint(built(size, {"untie_embeddings_and_output_weights": True, "save": folder}))


def adapted(rank, size, fields):
    trainer = built(size, fields)
    return [trainer.train_step().loss for _ in range(STEPS)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(folder of a model to adapt, losses of one process that adapts it)."""
    folder = str(tmp_path_factory.mktemp("base"))
    pool.run(1, save_base, folder)
    return folder, pool.run(1, adapted, {**LORA, "load": folder})[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_stage_without_layers(base, layout):
    folder, expected = base
    world, fields = LAYOUTS[layout]
    for losses in pool.run(world, adapted, {**LORA, **fields, "load": folder}):
        assert losses == pytest.approx(expected, rel=CLOSE)
    assert expected[0] - expected[-1] > 1e-3, "nothing is learned"
