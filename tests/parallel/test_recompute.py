"""Recompute changes no bit of a run: losses and parameters after some steps, under layouts that meet its corners."""

import dataclasses

import pytest

from megatron.config.context_parallel import inner_size
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.recompute import KEEP_ALL
from megatron.config.rules.check import check
from megatron.core.parameter import local_parameters
from megatron.core.transformer.lora import freeze_all_but_adapters
from megatron.tooling.layout_parity import reduced
from megatron.tooling.layouts import ParityLayout, under
from megatron.training.setup import build
from tests import pool
from tests.parallel.test_layout_parity import MODELS
from tests.unit.config.runs import make_run
from tests.unit.models.builds import CPU, GPT, LLAMA, accumulate, make_data_parallel, make_ids, make_model, pieces
from tests.unit.recompute.test_rerun import MODES, full, selective

STEPS, FEW_STEPS = 20, 5
SOME = {
    "parts": selective("core_attn", "norm", "mlp_act"),
    "mlp": selective("core_attn", "layernorm", "mlp"),
    "full, uniform 2": full("uniform", 2),
    "full, block 1": full("block", 1),
}
OVERLAPPED = {"overlapped_distributed_optimizer": True}
ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params", "grad_reduce_mode": "every-microbatch"}
OVER_TP = {"tp_comm_overlap": True}
# model, layout, microbatches a step, dropout of attention and of hidden states, flags
CASES = {
    "one rank": ("llama", ParityLayout(1, 1), 4, (0.1, 0.1), OVERLAPPED),
    "overlapped optimizer": ("llama", ParityLayout(2, 2, True), 1, (0.1, 0.1), OVERLAPPED),
    "split backward": ("gpt", ParityLayout(1, 2, pp=2, schedule="zb-v"), 4, (0.1, 0.1), OVERLAPPED),
    "1f1b, tensor overlap": ("llama", ParityLayout(2, 1, pp=2, schedule="1f1b"), 4, (0.0, 0.0), OVER_TP),
    "split backward, sequence parallel": ("llama", ParityLayout(2, 1, True, 2, "zb-h1"), 4, (0.0, 0.1), OVER_TP),
    "interleaved": ("llama", ParityLayout(1, 1, pp=2, schedule="interleaved", chunks=2), 4, (0.1, 0.1), OVERLAPPED),
    "four stages": ("gpt", ParityLayout(1, 1, pp=4, schedule="1f1b"), 4, (0.0, 0.1), OVERLAPPED),
    "all forwards first": ("gpt", ParityLayout(1, 1, pp=4, schedule="gpipe"), 4, (0.1, 0.1), OVERLAPPED),
    "sharded parameters": ("gpt", ParityLayout(1, 2), 4, (0.1, 0.1), ZERO3),
    "gathered keys": ("llama", ParityLayout(1, 1, cp=2, comm_type="all_gather"), 1, (0.0, 0.1), {}),
    "ring": ("gpt", ParityLayout(1, 1, cp=2, comm_type="p2p"), 1, (0.0, 0.0), {}),
    "heads for tokens": ("llama", ParityLayout(1, 1, cp=2, comm_type="a2a"), 1, (0.1, 0.1), {}),
}


def make(case, steps=STEPS, layers=2):
    """The run and its layout. `layers`: of each stage."""
    model, layout, microbatches, (attention, hidden), flags = CASES[case]
    run = under(reduced(make_run(**MODELS[model], **flags), steps), layout)
    shape = {"hidden_size": 32, "kv_channels": 8, "num_attention_heads": 4, "ffn_hidden_size": 32}
    groups = {"num_query_groups": 2} if run.model.group_query_attention else {}
    return dataclasses.replace(
        run,
        model=dataclasses.replace(
            run.model,
            num_layers=layers * layout.pp * (2 if layout.schedule == "zb-v" else layout.chunks or 1),
            attention_dropout=attention,
            hidden_dropout=hidden,
            **shape,
            **groups,
        ),
        train=dataclasses.replace(run.train, global_batch_size=layout.dp * microbatches),
    ), layout


def trained(run, layout):
    """(losses, a copy of what this rank owns of the parameters, the trainer)"""
    instances = data_parallel_settings(run.parallel).optimizer_instances
    inner = inner_size(run.parallel)
    groups = pool.groups(tp=layout.tp, cp=layout.cp, pp=layout.pp, instances=instances, inner=inner)
    trainer = build(run, groups, CPU)
    losses = [trainer.train_step().loss for _ in range(run.train.train_iters)]
    trainer.data_parallel.synchronize()
    return losses, [(piece.name, part.clone()) for piece, part in trainer.data_parallel.weights()], trainer


def differences(rank, size, case, modes, steps):
    """(losses without recompute, mode -> what is not the same with it)"""
    run, layout = make(case, steps)
    losses, expected, _ = trained(run, layout)
    found = {}
    for name in modes:
        again = dataclasses.replace(run, recompute=SOME[name])
        check(again, size)
        other, weights, _ = trained(again, layout)
        wrong = [n for (n, a), (_, b) in zip(weights, expected, strict=True) if not a.equal(b)]
        found[name] = wrong if other == losses else ["loss", *wrong]
    return losses, found


def assert_the_same_bits(case, modes, steps):
    for losses, found in pool.run(CASES[case][1].world_size, differences, case, modes, steps, timeout=300.0):
        assert found == {name: [] for name in modes}
        assert len(set(losses)) == steps, "nothing was learned"


@pytest.mark.parametrize(
    ("case", "modes", "steps"),
    [
        ("one rank", ("mlp", "full, block 1"), FEW_STEPS),
        ("overlapped optimizer", ("parts", "full, uniform 2"), FEW_STEPS),
        ("split backward, sequence parallel", ("mlp", "full, block 1"), 4),
        ("sharded parameters", ("parts", "full, uniform 2"), FEW_STEPS),
        ("gathered keys", ("mlp", "full, block 1"), FEW_STEPS),
        ("ring", ("parts", "full, uniform 2"), FEW_STEPS),
    ],
)
def test_the_same_bits(case, modes, steps):
    assert_the_same_bits(case, modes, steps)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_with_every_mode(case):
    assert_the_same_bits(case, tuple(SOME), STEPS)


def adapted(rank, size, fields, sequence_parallel):
    """Gradient pieces of adapters, by mode."""
    groups, found = pool.groups(tp=size), {}
    for mode, recompute in {"none": KEEP_ALL, **MODES}.items():
        model = make_model(fields, groups, spread=0.3, sequence_parallel=sequence_parallel, recompute=recompute)
        freeze_all_but_adapters(local_parameters(model.train()))
        data_parallel = make_data_parallel(model, groups)
        accumulate(model, data_parallel, [make_ids(2, 8, seed) for seed in range(2)])
        found[mode] = pieces(data_parallel)
    return found


@pytest.mark.parametrize(("fields", "sequence_parallel"), [(LLAMA, True), (GPT, False)], ids=["llama, sp", "gpt"])
def test_adapters(fields, sequence_parallel):
    fields = {**fields, "lora_rank": 3, "lora_dropout": 0.2, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    for found in pool.run(2, adapted, fields, sequence_parallel):
        for mode in MODES:
            for (name, *_, a), (*_, b) in zip(found[mode], found["none"], strict=True):
                assert (a == b).all(), (mode, name)


def gathered(rank, size, recompute):
    """All-gathers of the third step with sharded parameters."""
    run = dataclasses.replace(make("sharded parameters", 3)[0], recompute=recompute)
    groups = pool.groups(instances=data_parallel_settings(run.parallel).optimizer_instances)
    trainer = build(run, groups, CPU)
    for _ in range(2):
        trainer.train_step()
    with groups.heartbeat.record() as calls:
        trainer.train_step()
    return sum(call.op == "all_gather" for call in calls)


def test_sharded_parameters_are_gathered_once_for_recomputation_and_backward():
    kept, again = (pool.run(2, gathered, r)[0] for r in (KEEP_ALL, SOME["full, uniform 2"]))
    assert 0 < again <= kept
