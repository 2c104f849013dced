"""--batch-invariant-mode under layouts: generation reports the log-probabilities of training with the same tp."""

import pytest
import torch

from benchmarks.logprob_parity import difference, pack, trained_logprobs
from megatron.config.model import ModelConfig
from megatron.core.comm.collectives import all_reduce_in_rank_order, gather_objects, reduce_scatter
from megatron.core.context_parallel import layout
from megatron.core.models.gpt import GPTModel
from megatron.core.parameter import initialize, local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels
from megatron.kernels.ops.attention_segments import segments_of
from megatron.schedule.partition import partition
from tests import pool
from tests.unit.inference.small import small_model
from tests.unit.inference.test_parity import EXACT, MODELS, sampled

CPU = torch.device("cpu")
# sizes of tp, pp, ep; ranks
TP2, PP2, EP2, TP2_EP2, TP2_PP2, TP4 = (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (2, 2, 1), (4, 1, 1)
LENGTHS = (17, 5, 66)


def stage_of(groups, fields, *, sequence_parallel):
    """(this rank's stage of the model, how it was built)."""
    config = ModelConfig(**fields)
    kernels = choose_kernels(config, CPU, blocks=groups.cp.size > 1, etp=groups.etp.size)
    rng, kinds = RngTracker(0, groups, CPU), ("a2a",) * config.num_layers
    build = Build(config, groups, sequence_parallel and groups.tp.size > 1, kernels, rng, CPU, cp_comm_types=kinds)
    model = GPTModel(build, [partition(config.num_layers, range(groups.pp.size))[groups.pp.rank]])
    initialize(local_parameters(model), 3)
    return model, build


def sample_and_train(rank, size, sizes, fields):
    """(sampled sequences on the first rank of tp x pp, their log-probabilities in training on the last stage).

    Every replica samples and trains on tokens of its own. Training has sequence parallelism.
    """
    tp, pp, ep = sizes
    groups = pool.groups(tp=tp, pp=pp, ep=ep, etp=1 if ep > 1 else None, experts="num_experts" in fields)
    model, build = stage_of(groups, fields, sequence_parallel=False)
    first = groups.dp.rank * len(LENGTHS)
    sequences = gather_objects(sampled(model.eval(), build, LENGTHS, first=first), groups.model)[0]
    model, build = stage_of(groups, fields, sequence_parallel=True)
    with torch.no_grad():
        padded = trained_logprobs(model.train(), build, sequences)
        packed = trained_logprobs(model, build, sequences, per_row=3)
    return sequences if groups.model.rank == 0 else None, padded, packed


def check(sizes, name, bf16, size):
    fields = {**MODELS[name], **EXACT, "bf16": bf16, "num_layers": 2}
    results = pool.run(size, sample_and_train, sizes, fields)
    replicas = [sequences for sequences, _, _ in results if sequences is not None]
    tp, pp, _ = sizes
    ends = [(padded, packed) for _, padded, packed in results if padded is not None]
    assert len(ends) == size // pp and len(replicas) == size // (tp * pp)
    for number, (padded, packed) in enumerate(ends):
        sequences = replicas[number // tp]
        for trained in (padded, packed):
            gap = difference(sequences, trained)
            assert (gap.equal, gap.k3) == (1.0, 0.0), (number, gap)
    return replicas


CASES = [
    (TP2, "dense", False, 2),
    (TP2, "dense", True, 2),
    (PP2, "dense", True, 2),
    (TP2_EP2, "sigmoid experts", True, 2),
]
SLOW = [
    (TP2, "gpt2", True, 2),
    (TP2, "latents", True, 2),
    (TP2, "adapters", True, 2),
    (TP2_EP2, "sigmoid experts", False, 2),
    (EP2, "sigmoid experts", False, 2),
    (PP2, "sigmoid experts", False, 2),
    (TP2, "softmax experts", True, 2),  # etp 2
    (TP2_PP2, "dense", True, 4),
    (TP2_EP2, "softmax experts", True, 4),
    (TP4, "dense", True, 4),
    (TP4, "dense", False, 4),
]


@pytest.mark.parametrize(
    ("sizes", "name", "bf16", "size"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_generation_reports_the_numbers_of_training(sizes, name, bf16, size):
    check(sizes, name, bf16, size)


def test_replicas_and_stages_have_the_numbers_of_one_process():
    """dp 2 and pp 2: seeds decide about the tokens, and the layout about nothing."""
    fields = {**MODELS["dense"], **EXACT, "bf16": True, "num_layers": 2}
    model, build = small_model(pool.groups(), **fields)
    expected = [sampled(model, build, LENGTHS, first=first) for first in (0, len(LENGTHS))]
    for sizes, replicas in ((PP2, 1), ((1, 1, 1), 2)):
        answers = check(sizes, "dense", True, 2)
        assert len(answers) == replicas
        for sequences, others in zip(answers, expected, strict=False):
            assert [s.ids for s in sequences] == [s.ids for s in others]
            assert [s.logprobs for s in sequences] == [s.logprobs for s in others]


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        (EP2, "sigmoid experts"),
        pytest.param((1, 1, 4), "sigmoid experts", marks=pytest.mark.slow),
        pytest.param(EP2, "softmax experts", marks=pytest.mark.slow),  # three experts on a rank
    ],
    ids=str,
)
def test_experts_on_several_ranks_have_the_numbers_of_one_process(sizes, name):
    fields = {**MODELS[name], **EXACT, "bf16": True, "num_layers": 2}
    model, build = small_model(pool.groups(), **fields)
    size = sizes[2]
    for number, sequences in enumerate(check(sizes, name, True, size)):
        expected = sampled(model, build, LENGTHS, first=number * len(LENGTHS))
        assert [s.ids for s in sequences] == [s.ids for s in expected]
        assert [s.logprobs for s in sequences] == [s.logprobs for s in expected]


def losses(rank, size, cp, fields):
    """This rank's losses of packed documents."""
    groups = pool.groups(cp=cp)
    model, _ = stage_of(groups, fields, sequence_parallel=False)
    batch = documents()
    parts = [layout.take(x, 1, groups.cp.rank, cp) if cp > 1 else x for x in batch[:3]]
    with torch.no_grad():
        return model(parts[0], parts[2], parts[1], segments_of(batch.ids, CPU))


def documents():
    """Two rows of documents of several lengths."""
    model, build = small_model(pool.groups(), **{**MODELS["dense"], **EXACT})
    return pack(sampled(model, build, (17, 66, 30, 40), max_new_tokens=4), 2, multiple=4)


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_context_parallelism_by_heads_has_the_numbers_of_one_process(bf16):
    fields = {**MODELS["dense"], **EXACT, "bf16": bf16}
    (expected,) = pool.run(1, losses, 1, fields)
    joined = layout.to_natural_order(torch.cat(pool.run(2, losses, 2, fields), dim=1), 1, 2)
    assert torch.equal(joined, expected)


def sums(rank, size):
    groups = pool.groups(tp=size)
    x = torch.randn(64, 33, generator=torch.Generator().manual_seed(rank))
    return [
        all_reduce_in_rank_order(x, groups.tp),
        torch.cat([all_reduce_in_rank_order(row, groups.tp) for row in x.split(1)]),
        reduce_scatter(x, groups.tp),
    ]


@pytest.mark.slow
def test_sums_over_ranks_do_not_depend_on_the_place():
    results = pool.run(4, sums)
    whole, by_row, _ = results[0]
    assert torch.equal(whole, by_row)
    assert torch.equal(torch.cat([scattered for *_, scattered in results]), whole)
    one_by_one = [torch.randn(64, 33, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    assert torch.equal(whole, one_by_one[0] + one_by_one[1] + one_by_one[2] + one_by_one[3])
