"""Properties of predicted times that hold for any layout: better hardware is never slower, and the parts add up."""

import dataclasses
import random

import numpy as np
import pytest

from megatron.base.errors import ConfigError
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.mesh import mesh_of
from megatron.config.moe_training import MoEConfig
from megatron.config.optimizer import ScheduleConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.recompute import RecomputeConfig
from megatron.config.rules.check import check
from megatron.config.run import RunConfig
from megatron.config.settings import resolve
from megatron.config.train import TrainConfig
from megatron.planner.time.constants import fitted
from megatron.planner.time.hardware import FP8, built_in, with_device
from megatron.planner.time.software import Software
from megatron.planner.time.step_time import PARTS, StepModel, step_seconds
from tests.unit.planner.models import LLAMA

ROUNDING = 1e-9
SMALL = dataclasses.replace(LLAMA, num_layers=24, hidden_size=1024, ffn_hidden_size=2816, num_query_groups=8)
LARGE = dataclasses.replace(SMALL, num_layers=24, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64)
EXPERTS = dataclasses.replace(SMALL, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=2816, moe_layer_freq="1")
MODELS = (SMALL, LARGE, EXPERTS)
FULL = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SOME = RecomputeConfig(recompute_granularity="selective", recompute_modules=("core_attn", "mlp_act"))
SOFTWARE = (Software(), Software(unfused_attention=True))


def random_run(rng):
    """(run, ranks) of a layout that the rules accept, or None."""
    pick = rng.choice
    p, cp = pick((1, 1, 2, 4, 8)), pick((1, 1, 1, 2, 4, 8))
    schedule = pick((None, None, "zb-h1", "zb-v", "gpipe")) if p > 1 else None
    v = pick((None, 2, 3)) if p > 1 and schedule is None else None
    tp, kind = pick((1, 2, 4, 8)), pick(("p2p", "p2p", "all_gather", "a2a", "a2a+p2p")) if cp > 1 else "p2p"
    shards = pick(("no_shard", "optim", "optim_grads", "optim_grads_params"))
    overlap = pick((True, False)) and shards != "no_shard"
    model = pick(MODELS)
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1 and pick((True, model.num_experts is not None)),
        tp_comm_overlap=tp > 1 and pick((True, False)),
        context_parallel_size=cp,
        cp_comm_type=(kind,),
        hierarchical_context_parallel_sizes=(2, cp // 2) if kind == "a2a+p2p" else None,
        pipeline_model_parallel_size=p,
        pipeline_schedule=schedule,
        num_virtual_stages_per_pipeline_rank=v,
        overlap_p2p_communication=pick((True, False)),
        expert_model_parallel_size=pick((1, 2, 4)) if model.num_experts else 1,
        expert_tensor_parallel_size=1 if model.num_experts else None,
        data_parallel_sharding_strategy=shards,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and pick((True, False)),
    )
    dp, micro_batch = pick((1, 2, 8)), pick((1, 2, 4))
    run = RunConfig(
        model=model,
        moe=MoEConfig(moe_router_force_load_balancing=model.num_experts is not None),
        parallel=parallel,
        recompute=pick((RecomputeConfig(), FULL, SOME)),
        train=TrainConfig(
            micro_batch_size=micro_batch, global_batch_size=micro_batch * dp * pick((1, 4, 9, 24)), train_iters=1
        ),
        schedule=ScheduleConfig(lr=1e-4),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer"),
        data=DataConfig(seq_length=pick((256, 2048, 8192)), mock_data=True),
    )
    ranks = tp * cp * p * dp
    try:
        check(run, ranks)
        resolve(run, mesh_of(parallel, ranks))
    except ConfigError:
        return None
    return run, ranks


def random_cluster(rng):
    """A built-in device with links between 100 Mbit/s and those of its data sheet."""
    cluster = built_in(rng.choice(("a100", "h100", "b200")))
    slower = 10 ** rng.uniform(-3.5, 0)
    return with_device(
        dataclasses.replace(cluster, node=rng.choice((1, 4, 8)), network=cluster.network * slower),
        link=cluster.device.link * 10 ** rng.uniform(-2, 0),
    )


def better(cluster, what, factor):
    """The cluster with one of its rates times a factor."""
    device = cluster.device
    if what == "flops":
        rates = {
            field: {kind: factor * rate for kind, rate in getattr(device, field).items()}
            for field in ("peak", "reached")
        }
        return dataclasses.replace(cluster, device=dataclasses.replace(device, **rates))
    if what in ("network", "host"):
        return dataclasses.replace(cluster, **{what: factor * getattr(cluster, what)})
    return with_device(cluster, **{what: factor * getattr(device, what)})


def cases(seed, count):
    """Layouts with a cluster and the kernels of a run."""
    rng = random.Random(seed)
    found = 0
    while found < count:
        drawn = random_run(rng)
        if drawn is None:
            continue
        found += 1
        cluster, software = random_cluster(rng), rng.choice(SOFTWARE)
        if FP8 in cluster.device.peak and rng.random() < 0.2:
            software = dataclasses.replace(software, precision=FP8)
        yield rng, *drawn, cluster, software


def model_on(run, ranks, cluster, software):
    return StepModel(run, resolve(run, mesh_of(run.parallel, ranks)), cluster, software)


def check_better_hardware(seed, count):
    for rng, run, ranks, cluster, software in cases(seed, count):
        names = ("flops", "bandwidth", "link", "network", "host")
        clusters = [cluster, *(better(cluster, name, 10 ** rng.uniform(0.01, 2)) for name in names)]
        models = [model_on(run, ranks, each, software) for each in clusters]
        before, *after = step_seconds(models, fitted())[:, 0]
        slower = {name: seconds / before for name, seconds in zip(names, after) if seconds > before * (1 + ROUNDING)}
        assert not slower, (slower, run.parallel, run.train, run.data.seq_length, cluster, software)


def check_parts(seed, count):
    for _, run, ranks, cluster, software in cases(seed, count):
        model = model_on(run, ranks, cluster, software)
        time = model.time(model.clock(fitted()))
        assert set(time.parts) <= set(PARTS)
        assert sum(time.parts.values()) == pytest.approx(time.seconds, rel=ROUNDING)
        assert float(np.squeeze(step_seconds([model], fitted()))) == pytest.approx(time.seconds, rel=ROUNDING)
        assert all(seconds > -ROUNDING * time.seconds for seconds in time.parts.values()), time.parts


def test_better_hardware_is_never_slower():
    check_better_hardware(1, 40)


def test_parts_add_up():
    check_parts(2, 25)


@pytest.mark.slow
def test_better_hardware_is_never_slower_for_many():
    check_better_hardware(3, 1500)


@pytest.mark.slow
def test_parts_add_up_for_many():
    check_parts(4, 400)
