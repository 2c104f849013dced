"""A model with experts, saved under one layout, continues under others: every tensor of the file keeps its bits."""

import pytest

from megatron.config.data_parallel import data_parallel_settings
from megatron.core.dist_checkpointing.folders import find
from megatron.training.checkpoint import save_checkpoint
from megatron.training.setup import build
from tests import pool
from tests.e2e.helpers.runs import checkpoint
from tests.unit.config.runs import SHORT_RUN, make_run
from tests.unit.models.builds import CPU
from tools.checkpoint import convert

FIELDS = {
    **SHORT_RUN,
    "num_layers": 2,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "ddp_bucket_size": 3000,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_experts": 8,
    "moe_router_topk": 3,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_load_balancing_type": ("global_aux_loss",),
    "moe_aux_loss_coeff": (0.01,),
    "use_distributed_optimizer": True,
}
CHAIN = {
    "ep 4": (4, {"expert_model_parallel_size": 4}),
    "ep 2 x etp 2": (4, {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    "ep 1 x tp 2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "ep 8": (8, {"expert_model_parallel_size": 8}),
}


def built(size, fields):
    run = make_run(**{**FIELDS, **fields})
    parallel = run.parallel
    groups = pool.groups(
        tp=parallel.tensor_model_parallel_size,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_parallel_size,
        instances=data_parallel_settings(parallel).optimizer_instances,
    )
    return build(run, groups, CPU)


def session(rank, size, fields, steps):
    """Trains some steps and saves. Returns the losses."""
    trainer = built(size, fields)
    losses = [trainer.train_step().loss for _ in range(steps)]
    save_checkpoint(trainer)
    return losses


def test_a_chain_of_layouts_keeps_every_bit(tmp_path):
    """Weights, moments, biases of experts and the load of the batch before."""
    before = None
    for number, (size, layout) in enumerate(CHAIN.values()):
        folder = tmp_path / str(number)
        load = {"load": str(tmp_path / str(number - 1))} if number else {}
        pool.run(size, session, {**layout, **load, "save": str(folder)}, 0 if number else 3)
        tensors, _ = checkpoint(find(folder, None))
        found = {name: tensor for name, tensor in tensors.items() if not name.startswith("rng/")}
        if before is not None:
            assert found.keys() == before.keys()
            assert all(found[name].equal(tensor) for name, tensor in before.items())
        before = found
    biases = [tensor for name, tensor in before.items() if name.endswith("expert_bias")]
    loads = [tensor for name, tensor in before.items() if name.endswith("previous_load")]
    assert len(biases) == len(loads) == 2 and all(bias.any() for bias in biases)
    assert all(load.sum() == 8 * 16 * 3 for load in loads)


@pytest.mark.parametrize("form", [pytest.param("torch", marks=pytest.mark.slow), "torch_dist"])
def test_megatron_lms_folder_continues_with_every_bit(form, tmp_path):
    """Weights, moments and biases of experts, written for ep 2 and read under another layout."""
    ours, there, back = tmp_path / "ours", tmp_path / "there", tmp_path / "back"
    pool.run(2, session, {"expert_model_parallel_size": 2, "save": str(ours)}, 3)
    flags = ["--saver", "mcore", "--format", form, "--target-expert-parallel-size", "2", "--save-dir", str(there)]
    assert convert.main(["--loader", "megatron", "--load-dir", str(ours), *flags]) == 0
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}
    pool.run(2, session, {**layout, "load": str(there), "save": str(back), "data_order": "megatron"}, 0)
    before, after = (
        {n: t for n, t in checkpoint(find(folder, None))[0].items() if not n.startswith(("rng/", "load/"))}
        for folder in (ours, back)
    )
    assert before.keys() == after.keys() and any(name.endswith("expert_bias") for name in before)
    assert all(after[name].equal(tensor) for name, tensor in before.items())


@pytest.mark.parametrize("layout", ["ep 4"])
def test_the_same_run_goes_on_bit_for_bit(layout, tmp_path):
    size, fields = CHAIN[layout]
    whole = pool.run(size, session, {**fields, "save": str(tmp_path / "whole")}, 5)[0]
    pool.run(size, session, {**fields, "save": str(tmp_path / "half")}, 3)
    rest = pool.run(size, session, {**fields, "load": str(tmp_path / "half"), "save": str(tmp_path / "half")}, 2)[0]
    assert rest == whole[3:]
