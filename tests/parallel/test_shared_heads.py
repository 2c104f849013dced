"""More tp ranks than key/value heads: neighbours hold copies of a head, and the model trains as with one process."""

import dataclasses
import functools

import pytest

from megatron.config.context_parallel import inner_size
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.rules.check import check
from megatron.tooling.layout_parity import assemble, compare, measure
from megatron.tooling.layouts import ParityLayout, under
from megatron.training.checkpoint import save_checkpoint
from megatron.training.setup import build
from tests import pool
from tests.e2e.helpers.runs import checkpoint
from tests.parallel.strategies import make_run as make_small_run
from tests.parallel.test_strategies import OTHER_LAYOUT, assert_identical, distance, results
from tests.unit.config.runs import make_run
from tests.unit.models.builds import CPU, LLAMA, accumulate, make_ids

STEPS, LIMIT = 4, 1e-5
FIELDS = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 8,
    "group_query_attention": True,
    "vocab_size": 61,
    "make_vocab_size_divisible_by": 8,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_length": 16,
    "global_batch_size": 4,
    "micro_batch_size": 1,
    "num_workers": 0,
    "eval_iters": 0,
    "train_iters": 30,
    "save_interval": 100,
    "log_interval": 1000,
    "lr": 1e-3,
    "ddp_bucket_size": 3000,
}
MODELS = {
    "one group, rotary": {
        "num_query_groups": 1,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
    },
    "one group, biases": {"num_query_groups": 1, "qk_layernorm": True, "untie_embeddings_and_output_weights": True},
    "two groups": {"num_query_groups": 2, "qk_layernorm": True, "position_embedding_type": "rope"},
    "two groups, normed together": {
        "num_query_groups": 2,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "pre_norm": False,
        "post_norm": True,
    },
}
ZERO = [{"data_parallel_sharding_strategy": kind} for kind in ("optim", "optim_grads", "optim_grads_params")]
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES = [
    ("one group, rotary", ParityLayout(2, 1), {}),
    ("one group, rotary", ParityLayout(4, 1, True), {"tp_comm_overlap": True}),
    ("two groups, normed together", ParityLayout(4, 1, True), {"overlap_grad_reduce": True}),
    ("one group, biases", ParityLayout(2, 2, True), {**ZERO[2], "overlap_grad_reduce": True}),
    ("one group, rotary", ParityLayout(2, 1, pp=2, schedule="zb-h1"), {}),
    ("one group, biases", ParityLayout(2, 1, True, cp=2, comm_type="p2p"), {}),
]
SLOW = [  # more of what the cases above cover, and test_the_same_bits_however_replicas_share_work
    ("two groups", ParityLayout(4, 1, True), {"overlap_grad_reduce": True}),
    ("two groups, normed together", ParityLayout(4, 1, True), {}),
    (
        "one group, rotary",
        ParityLayout(2, 2, True),
        {**ZERO[1], "overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
    ("one group, rotary", ParityLayout(2, 1, cp=2, comm_type="all_gather"), ZERO[0]),
    ("one group, biases", ParityLayout(2, 1, True), {"gradient_accumulation_fusion": False}),
    ("two groups", ParityLayout(4, 1), RECOMPUTED),
    ("two groups, normed together", ParityLayout(4, 1), RECOMPUTED),
    ("one group, biases", ParityLayout(2, 2), ZERO[0]),
    ("one group, rotary", ParityLayout(2, 1, cp=2, comm_type="a2a"), {}),
]


def run_of(model, parallel=()):
    return make_run(**{**FIELDS, **MODELS[model], **dict(parallel)})


def measured(rank, size, run, layout):
    run = under(run, layout)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, train_iters=STEPS))
    instances = data_parallel_settings(run.parallel).optimizer_instances
    inner = inner_size(run.parallel)
    groups = pool.groups(tp=layout.tp, cp=layout.cp, pp=layout.pp, instances=instances, inner=inner)
    return measure(run, groups, CPU).as_arrays()


@functools.cache
def reference(model):
    return assemble(pool.run(1, measured, run_of(model), ParityLayout(1, 1)))


@pytest.mark.parametrize(
    ("model", "layout", "parallel"),
    [*CASES, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
    ids=str,
)
def test_training_is_that_of_one_process(model, layout, parallel):
    run = run_of(model, parallel.items())
    check(under(run, layout), layout.world_size)
    found = assemble(pool.run(layout.world_size, measured, run, layout))
    expected = reference(model)
    assert found.gradients.keys() == expected.gradients.keys()
    difference = compare(expected, found)
    assert difference.loss <= LIMIT, f"losses differ by {difference.loss:.1e}"
    assert difference.gradient <= LIMIT, f"{difference.parameter} differs by {difference.gradient:.1e}"


SHARED = {**LLAMA, "num_layers": 1, "num_query_groups": 1, "add_qkv_bias": True}


def test_the_same_bits_however_replicas_share_work():
    """Also slices of buckets that cut between own and shared rows; `results` compares the copies' weights bit for
    bit."""
    names = ("plain", "optim, overlapped", "params")
    found = results(4, names, fields=SHARED, tp=2, sequence_parallel=True)
    for name in names:
        assert_identical(found[name], found["plain"])
    expected = results(1, ("plain",), fields=SHARED)["plain"]
    assert distance(found["plain"], expected)[0] <= OTHER_LAYOUT
    assert found["plain"][1] == pytest.approx(expected[1], rel=OTHER_LAYOUT), "a copy counts once in the norm"


def counted(rank, size, tp, groups):
    """(norm of the gradient, its zeros, norm of the parameters, (collective, group) of a step's sums over tp)"""
    run = make_small_run({}, fields={**SHARED, "num_query_groups": groups}, tp=tp)
    ids = make_ids(3, 8)
    with run.groups.heartbeat.record() as calls:
        accumulate(run.model, run.data_parallel, [ids])
    sums = [(call.op, call.group) for call in calls if len(call.shape) == 1 and call.group != "tp"]
    # Zeros in the rows of queries, which one rank has, and of keys and values, of which there are copies.
    qkv = run.model.decoder.layers["0"].self_attention.linear_qkv.weight
    for section in qkv.info.sections:
        section.of(qkv.slot.main_grad)[..., :3] = 0.0
    update = run.optimizer.step(1e-3, 0.0, count_zeros=True)
    return float(update.grad_norm), int(update.num_zeros), float(run.optimizer.params_norm()), sums


@pytest.mark.parametrize(("tp", "groups"), [(2, 1), (4, 2)])
def test_a_copy_counts_once(tp, groups):
    ((norm, zeros, params, _),) = pool.run(1, counted, 1, groups)
    for found in pool.run(tp, counted, tp, groups):
        assert found[0] == pytest.approx(norm, rel=1e-5) and found[2] == pytest.approx(params, rel=1e-6)
        assert found[1] == zeros > 0
        # Copies of two of four ranks are summed over those; of all ranks with what else is partial over tp.
        assert found[3] == ([("all_reduce", "tp_inner")] if groups > 1 else [])


def session(rank, size, fields, before, after):
    """Losses of the steps after a checkpoint, which is saved after `before` steps."""
    run = make_run(**{**FIELDS, "num_layers": 1, **fields})
    check(run, size)
    instances = data_parallel_settings(run.parallel).optimizer_instances
    trainer = build(run, pool.groups(tp=run.parallel.tensor_model_parallel_size, instances=instances), CPU)
    for _ in range(before):
        trainer.train_step()
    if run.checkpoint.save:
        save_checkpoint(trainer)
    return [trainer.train_step().loss for _ in range(after)]


def at(tp):
    return {"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1}


@pytest.mark.parametrize(
    ("fields", "there"),
    [
        (MODELS["two groups"], at(4)),
        ({**MODELS["one group, biases"], "bf16": True}, {**at(2), **ZERO[2]}),
    ],
    ids=["tp 4, two groups", "tp 2 x dp 2, one group, ZeRO-3, bf16"],
)
def test_a_checkpoint_belongs_to_no_layout(tmp_path, fields, there):
    """Saved where ranks hold copies, loaded and saved again under three layouts: no bit changes, and the run goes
    on."""
    folders = [str(tmp_path / str(number)) for number in range(4)]
    expected = pool.run(4, session, {**fields, **there, "save": folders[0]}, 3, 2)
    layouts = [(1, at(1)), (2, at(2)), (4, there)]
    for (world, layout), source, target in zip(layouts, folders, folders[1:]):
        pool.run(world, session, {**fields, **layout, "load": source, "save": target}, 0, 0)
    tensors, *others = (checkpoint(tmp_path / f"{number}/iter_0000003")[0] for number in range(4))
    names = {name for name in tensors if not name.startswith("rng/")}
    assert any("linear_qkv.weight/exp_avg" in name for name in names)
    for other in others:
        assert [name for name in names if not tensors[name].equal(other[name])] == []
    assert pool.run(4, session, {**fields, **there, "load": folders[3]}, 0, 2) == expected
