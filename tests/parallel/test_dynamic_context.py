"""Documents on groups of different sizes: the same losses and gradients as with the samples of one process, and the
memory that is planned."""

import dataclasses
import functools
import itertools

import pytest
import torch

from megatron.config.context_parallel import context_sizes, group_sizes
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.mesh import mesh_of
from megatron.config.rules.check import check
from megatron.config.run import flag_fields
from megatron.core.context_parallel.assignment import assign
from megatron.core.datasets.mock import MockDataset
from megatron.spec.decoder import decoder_spec
from megatron.spec.flops import train_flops
from megatron.tooling import memory_check
from megatron.tooling.layout_parity import SEQ_LENGTH, assemble, compare, measure
from megatron.tooling.layouts import ParityLayout, under
from megatron.training.batch import BatchReader, make_batch
from tests import pool
from tests.parallel.test_layout_parity_pp_cp import LAYERS, small

LIMIT = 1e-6  # other groups and sequences: products of other shapes, sums in another order
SAMPLES, STEPS = 8, 2
# A document ends with the last of 24 tokens: samples of 64 hold one to six documents.
DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}
OPTIM = {"use_distributed_optimizer": True}
ZERO_2, ZERO_3 = ({"data_parallel_sharding_strategy": name} for name in ("optim_grads", "optim_grads_params"))
EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": ("global_aux_loss",),
    "moe_aux_loss_coeff": (0.02,),
    "moe_z_loss_coeff": 1e-2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01,
}
LATENTS = {
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "group_query_attention": False,
    "num_query_groups": None,
    "qk_layernorm": True,
}
PREDICTIONS = {"mtp_num_layers": 2}
AGAIN = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "norm")}
UP_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ("mla_up_proj",)}
OFFLOAD = {"cpu_offloading": True, "cpu_offloading_num_layers": 1}
# Fields of the model; of the run; the layout; the smallest group.
QUICK = [
    ({}, OPTIM, ParityLayout(2, 2, True), 1),
    ({}, {}, ParityLayout(1, 2, pp=2, schedule="1f1b"), 1),
    (EXPERTS, ZERO_2, ParityLayout(1, 2, cp=2, ep=2), 1),
]
SLOW = [
    ({}, {}, ParityLayout(1, 2, cp=2), 1),
    ({}, ZERO_2, ParityLayout(2, 2, True), 1),
    ({}, OPTIM, ParityLayout(1, 1, cp=4), 1),
    ({}, AGAIN, ParityLayout(1, 4), 2),
    ({}, ZERO_3, ParityLayout(1, 2, cp=2, comm_type="a2a"), 1),
    ({}, OFFLOAD, ParityLayout(1, 2), 1),
    ({}, {"pipeline_offload_ratio": "0.5"}, ParityLayout(1, 2, pp=2, schedule="1f1b"), 1),
    ({}, {"tp_comm_overlap": True}, ParityLayout(2, 2, True), 1),
    ({}, ZERO_2, ParityLayout(1, 2, pp=2, schedule="interleaved", chunks=2), 1),
    ({}, OPTIM, ParityLayout(2, 2, True, pp=2, schedule="zb-v"), 1),
    (LATENTS, UP_AGAIN, ParityLayout(1, 2, cp=2), 1),
    (PREDICTIONS, {}, ParityLayout(1, 2), 1),
    (PREDICTIONS, {}, ParityLayout(2, 1, cp=2), 1),
    (EXPERTS, OPTIM, ParityLayout(1, 2, ep=2), 1),
    (EXPERTS, ZERO_3, ParityLayout(2, 2, True, ep=4, etp=1), 1),
    (EXPERTS, {}, ParityLayout(2, 2, True, ep=2), 1),
]


def documents(layers, fields):
    run = small("llama", SAMPLES, STEPS, layers)
    for name, value in {"vocab_size": 24, **DOCUMENTS, **fields}.items():
        part, spec = flag_fields()[name]
        run = dataclasses.replace(run, **{part: dataclasses.replace(getattr(run, part), **{spec.name: value})})
    return run


def dynamic(run, layout, smallest):
    """With groups of up to dp x cp ranks, which hold a sample of one document."""
    parallel = dataclasses.replace(
        run.parallel,
        dynamic_context_parallel=True,
        max_seqlen_per_dp_cp_rank=SEQ_LENGTH // (layout.dp * layout.cp),
        min_dynamic_context_parallel_size=smallest,
    )
    return dataclasses.replace(run, parallel=parallel)


def measured(rank, size, run, layout):
    run = under(run, layout)
    groups = pool.groups(
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        ep=layout.ep,
        etp=layout.etp,
        instances=data_parallel_settings(run.parallel).optimizer_instances,
        contexts=context_sizes(run.parallel, mesh_of(run.parallel, size)),
    )
    return measure(run, groups, torch.device("cpu")).as_arrays()


@functools.cache
def reference(model, layers):
    return without_choices(pool.run(1, measured, documents(layers, dict(model)), ParityLayout(1, 1)))


def without_choices(ranks):
    """They are listed by samples, which differ."""
    return dataclasses.replace(assemble(ranks), choices={}, margins={})


@pytest.mark.parametrize(
    ("model", "fields", "layout", "smallest"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_the_groups_change_nothing(model, fields, layout, smallest):
    layers = LAYERS[layout.pp > 1]
    run = dynamic(documents(layers, {**model, **fields}), layout, smallest)
    check(under(run, layout), layout.world_size)
    expected = reference(tuple(model.items()), layers)
    difference = compare(expected, without_choices(pool.run(layout.world_size, measured, run, layout)))
    assert difference.loss <= LIMIT, f"losses differ by {difference.loss:.1e}"
    assert difference.gradient <= LIMIT, f"{difference.parameter} differs by {difference.gradient:.1e}"
    assert difference.same_biases and difference.balance <= LIMIT and difference.norm <= LIMIT


def test_ranks_without_documents_run_microbatches_of_padding():
    """One sample of two documents on four ranks, which exchange tokens of experts in every microbatch."""
    layout, layers = ParityLayout(1, 1, cp=4, ep=4), LAYERS[False]
    one = documents(layers, {**EXPERTS, "global_batch_size": 1, "seed": 7})
    run = dynamic(one, layout, 1)
    sample = torch.as_tensor(MockDataset(1, SEQ_LENGTH, one.model.vocab_size, 3 * one.train.seed)[0])
    lengths = make_batch(sample[None], one.model.vocab_size - 1, run.data).segments.lengths
    work = functools.partial(train_flops, decoder_spec(run.model), samples=1)
    parallel = under(run, layout).parallel
    whole, single = assign(lengths, group_sizes(parallel, mesh_of(parallel, 4)), work)
    assert [share.documents for share in whole] == [(1,)] and [share.documents for share in single] == [
        (0,),
        (),
        (),
        (),
    ]
    expected = without_choices(pool.run(1, measured, one, ParityLayout(1, 1)))
    difference = compare(expected, without_choices(pool.run(4, measured, run, layout)))
    assert difference.loss <= LIMIT and difference.gradient <= LIMIT and difference.same_biases, difference


def whole_samples(trainer):
    """Samples of one document each: no token ends one."""
    data = trainer.run.data
    drawn = torch.Generator().manual_seed(trainer.groups.rank)
    samples = (torch.randint(0, 63, (1, data.seq_length + 1), generator=drawn) for _ in itertools.count())
    trainer.readers = dataclasses.replace(
        trainer.readers,
        train=BatchReader(samples, data, eod=63, micro_batch_size=1, groups=trainer.groups, device=trainer.device),
    )


def memory_of(rank, size, flags):
    return memory_check.measure(rank, size, flags, whole_samples)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "tokens", "flags"),
    [(2, 512, ""), (2, 512, "--cp-comm-type a2a"), (4, 256, "--context-parallel-size 4"), (2, 1024, "--bf16")],
)
def test_the_memory_is_that_of_the_longest_sequence(size, tokens, flags):
    long = "--seq-length 1024 --ffn-hidden-size 128 --vocab-size 64 --make-vocab-size-divisible-by 8"
    dynamic = f"--reset-attention-mask --dynamic-context-parallel --max-seqlen-per-dp-cp-rank {tokens}"
    words = f"{memory_check.LLAMA} {long} --micro-batch-size 1 --global-batch-size 4 {dynamic} {flags}"
    for rank in pool.run(size, memory_of, words):
        assert rank.planned.peak == pytest.approx(rank.peak, rel=0.03)
