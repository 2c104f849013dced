"""The connections that set-up opens are those that a step uses: calls of real runs on gloo, played by NCCL's rule."""

import dataclasses

import pytest

from megatron.config.context_parallel import inner_size
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.pipeline import passes_around
from megatron.config.rules.check import check
from megatron.core.comm.connections import open_connections
from megatron.core.groups import Group
from megatron.training.process import groups_of
from megatron.training.setup import build
from tests import pool
from tests.parallel.test_pipeline_checkpoints import OVERLAPPED, pipeline
from tests.unit.comm.hosts import Call, Stuck, play
from tests.unit.config.runs import SHORT_RUN, make_run
from tests.unit.models.builds import CPU

FIELDS = {**SHORT_RUN, "num_layers": 8, "micro_batch_size": 1}
# Not opened: used at the beginning or the end of a step, and by some runs only.
LATER = {"dp", "model", "ends"}


def communicators(groups, calls):
    """The calls as those on communicators, named by the first group that uses its process group."""
    named = [getattr(groups, field.name) for field in dataclasses.fields(groups)]
    named = [each for each in named if isinstance(each, Group)]
    named += [getattr(view, name) for view in groups.views.values() for name in ("shard", "gather", "replicas")]
    names = {}
    for group in named:
        first = next(each for each in named if each.process_group is group.process_group)
        names[group.name] = Call((first.name, group.ranks), frozenset(group.ranks))
    return [_of_pair(call.group) if call.group.startswith("pp ") else names[call.group] for call in calls]


def _of_pair(name):
    source, destination = map(int, name.removeprefix("pp ").split(">"))
    ranks = frozenset({source, destination})
    return Call(("up" if source < destination else "down", ranks), ranks)


def first_step(rank, size, fields):
    """What this rank calls while connections are opened, and then from building a trainer to the end of a first
    step."""
    run = make_run(**{**FIELDS, **fields})
    check(run, size)
    parallel = run.parallel
    groups = pool.groups(
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        instances=data_parallel_settings(parallel).optimizer_instances,
        inner=inner_size(parallel),
    )
    with groups.heartbeat.record() as opening:
        number = open_connections(groups, CPU, ring=passes_around(parallel))
    assert number == len(opening)
    with groups.heartbeat.record() as step:
        trainer = build(run, groups, CPU)
        trainer.train_step()
    return communicators(groups, opening), communicators(trainer.groups, step)


def context(cp, kind, **fields):
    """Fields of a layout."""
    sizes = (2, cp // 2) if kind == "a2a+p2p" else None
    return {
        "context_parallel_size": cp,
        "cp_comm_type": (kind,),
        "hierarchical_context_parallel_sizes": sizes,
        **fields,
    }


SHARDED = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CASES = {
    "1f1b": (2, pipeline(2, "1f1b")),
    "zb-h1": (2, pipeline(2, "zb-h1", untie_embeddings_and_output_weights=True)),
    "interleaved": (2, pipeline(2, "interleaved", 2)),
    "not overlapped": (2, pipeline(2, "1f1b", overlap_p2p_communication=False)),
    "pp 4, interleaved": (4, pipeline(4, "interleaved", 2)),
    "pp 4, zb-v": (4, pipeline(4, "zb-v")),
    "tp 2 x pp 2": (4, pipeline(2, "1f1b", **SHARDED)),
    "cp 2 x pp 2, p2p": (4, pipeline(2, "1f1b", **context(2, "p2p"))),
    "cp 2 x pp 2, all_gather": (4, pipeline(2, "zb-v", **context(2, "all_gather"))),
    "cp 2 x pp 2, a2a": (4, pipeline(2, "interleaved", 2, **context(2, "a2a"))),
    "cp 2 x dp 2, p2p": (4, context(2, "p2p")),
    "cp 4, a2a+p2p": (4, context(4, "a2a+p2p")),
    "dp 2 x pp 2, ZeRO-1": (4, pipeline(2, "1f1b", **OVERLAPPED)),
    "dp 4, ZeRO-3": (4, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "dp 4, two instances": (4, {**OVERLAPPED, "num_distributed_optimizer_instances": 2}),
    "dp 2 x tp 2, tokens": (4, {**SHARDED, "calculate_per_token_loss": True}),
}


EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "expert_model_parallel_size": 2,
}
WITH_EXPERTS = {
    "ep 2 over dp, pp 2": (4, {**EXPERTS, **pipeline(2, "1f1b")}),
    "ep 2, etp 2 over tp 2 x dp 2": (4, {**EXPERTS, **SHARDED}),
    "ep 2, etp 1 over tp 2 x cp 2": (4, {**EXPERTS, **SHARDED, **context(2, "p2p"), "expert_tensor_parallel_size": 1}),
}


def set_up(rank, size, fields):
    """What this rank calls while a trainer is built, on groups that the model decides."""
    run = make_run(**{**FIELDS, **fields})
    check(run, size)
    groups = groups_of(run.parallel, size, rank, pool.groups().heartbeat)
    with groups.heartbeat.record() as calls:
        made = build(run, groups, CPU).groups
    of = {made.tp_inner.name: made.tp_inner, "etp_ep": made.etp_ep, "tp_cp": made.tp_cp}
    return [(call.op, call.group, of[call.group].ranks) for call in calls if call.group in of]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_ranks_that_exchange_tokens_are_connected_before_the_first_step(name):
    """By one all-to-all on each group, at the same place in the calls of all ranks."""
    size, fields = WITH_EXPERTS[name]
    calls = pool.run(size, set_up, fields)
    assert all([op for op, group, _ in each if group == "etp_ep"] == ["all_to_all"] for each in calls)
    assert len({tuple((op, group) for op, group, _ in each) for each in calls}) == 1
    play(
        {rank: [Call((group, ranks), frozenset(ranks)) for _, group, ranks in each] for rank, each in enumerate(calls)}
    )


@pytest.mark.parametrize("name", CASES)
def test_a_step_uses_what_is_open(name):
    size, fields = CASES[name]
    opening, steps = (dict(enumerate(calls)) for calls in zip(*pool.run(size, first_step, fields), strict=True))
    made = play(opening)
    assert {communicator[0] for communicator in play(steps, made)} <= LATER
    if name in ("1f1b", "zb-h1", "interleaved"):
        with pytest.raises(Stuck):
            play(steps)
