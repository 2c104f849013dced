"""What sharded and overlapped optimizers are known to get wrong: odd parameters, odd sizes, odd moments."""

import time

import pytest
import torch
from torch import nn

from megatron.base.errors import UserError
from megatron.config.data_parallel import DataParallelSettings
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.parameter import local_parameters, make_parameter
from megatron.spec.parameter import Init, ParamSpec
from megatron.training.step import evaluate
from tests import pool
from tests.parallel.strategies import DECAY, FEW, LR, STRATEGIES, groups_for, make_run, parameters_of, whole
from tests.unit.distributed.test_bucket import Holder
from tests.unit.models.builds import (
    CPU,
    GPT,
    LLAMA,
    assemble,
    differentiate,
    losses,
    make_ids,
    make_optimizer,
    take_step,
)

SMALL = {**LLAMA, "num_layers": 1}
TIED = {**GPT, "num_layers": 1}
WORLD = 3
every_strategy = pytest.mark.parametrize("name", FEW)


def three_steps(rank, size, settings, options):
    run = make_run(settings, **options)
    found = run.steps(3, 2)
    return found, run.weights(), [list(bucket.parameters) for bucket in run.data_parallel.buckets], run.seen()


def compared(settings, options):
    """(names in each bucket, name -> weight) after three steps on three ranks, which are those of one process."""
    ((expected, weights, _, _),) = pool.run(1, three_steps, {}, options)
    ranks = pool.run(WORLD, three_steps, settings, options)
    found, expected_weights = whole([rank[1] for rank in ranks]), assemble([weights])
    for rank in ranks:
        assert rank[0][0] == pytest.approx(expected[0], rel=1e-5) and rank[0][1] == pytest.approx(expected[1], rel=1e-5)
        assert rank[3] == ranks[0][3], "what modules hold is the same everywhere"
    assert found.keys() == expected_weights.keys()
    for name, weight in expected_weights.items():
        # What is added to all keys has no gradient but rounding, which adam makes steps of.
        if not name.endswith(("linear_qkv.bias", "k_layernorm.bias")):
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=name)
    return ranks[0][2], found


@every_strategy
@pytest.mark.parametrize("bucket_size", [1, 10**6], ids=["own bucket", "shared bucket"])
def test_tied_embeddings(name, bucket_size):
    """The head's gradient comes first in backward, the embedding's last: the bucket waits for both."""
    buckets, _ = compared(STRATEGIES[name], {"fields": TIED, "bucket_size": bucket_size})
    (of_word,) = (names for names in buckets if "embedding.word_embeddings.weight" in names)
    assert len(of_word) == 1 if bucket_size == 1 else len(buckets) == 1


FROZEN = (
    "embedding.word_embeddings.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.final_layernorm.weight",
)


def freeze(model):
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)


def frozen(rank, size, settings):
    """(memory in buckets, whether frozen ones kept their value and have no slot, whether all others moved, seen)"""
    run = make_run(settings, fields=SMALL, before=freeze)
    fixed = {name: local_parameters(run.model)[name] for name in FROZEN}
    before = {name: parameter.detach().clone() for name, parameter in fixed.items()}
    start = run.weights()
    run.steps(3)
    kept = all(parameter.equal(before[name]) and parameter.slot is None for name, parameter in fixed.items())
    moved = all((old != new).any() for (*_, old), (*_, new) in zip(start, run.weights(), strict=True))
    held = sum(sum(bucket.layout.numels.values()) for bucket in run.data_parallel.buckets)
    trainable = sum(p.info.numel for n, p in local_parameters(run.model).items() if n not in FROZEN)
    return held == trainable, kept, moved, set(parameters_of(run.data_parallel)).isdisjoint(FROZEN), run.seen()


@every_strategy
def test_frozen_parameters_take_no_memory_and_never_move(name):
    ranks = pool.run(WORLD, frozen, STRATEGIES[name])
    assert [rank[:4] for rank in ranks] == [(True,) * 4] * WORLD
    assert len({rank[4] for rank in ranks}) == 1


def add_extra(model):
    """A parameter that the model does not use by itself."""
    extra = make_parameter(ParamSpec((70,), Init("constant", 0.0)), pool.groups(), dtype=torch.float32, device=CPU)
    nn.init.ones_(extra)
    model.register_parameter("extra", extra)


def unused(rank, size, settings):
    run = make_run(settings, fields=SMALL, before=add_extra, bucket_size=1000)
    found = run.steps(2, 2)
    return found, run.data_parallel.without_gradient(), run.weights()


@every_strategy
def test_a_parameter_that_nobody_uses_counts_zero(name):
    """Weight decay alone moves it, as it does with torch's AdamW and a gradient of zero."""
    ranks = pool.run(WORLD, unused, STRATEGIES[name])
    ((found, _, _),) = pool.run(1, unused, {})
    for rank in ranks:
        assert rank[1] == ["extra"]
        assert rank[0][0] == pytest.approx(found[0], rel=1e-5) and rank[0][1] == pytest.approx(found[1], rel=1e-5)
    extra = assemble([rank[2] for rank in ranks])["extra"]
    torch.testing.assert_close(extra, torch.full((70,), (1.0 - LR * DECAY) ** 2))


def used_on_one_rank(rank, size, settings):
    """What the step raises where rank 1 alone uses the parameter; and that the ranks still understand each other."""
    run = make_run(settings, fields=SMALL, before=add_extra, bucket_size=1000)
    if rank == 1:
        run.model.register_forward_hook(lambda module, inputs, loss: loss + module.extra.sum())
    try:
        take_step(run.step, run.batches(0, 2), LR, DECAY)
    except UserError as error:
        return str(error), make_run(settings, fields=SMALL).steps(1)[0]
    return "no error", []


@pytest.mark.parametrize("name", [name for name in FEW if name != "params"])
def test_a_parameter_that_one_rank_uses_stops_all(name):
    """But for sharded parameters: there the other ranks are missed where rank 1 gathers it, and the timeout says so."""
    started = time.monotonic()
    ranks = pool.run(WORLD, used_on_one_rank, STRATEGIES[name])
    assert time.monotonic() - started < 30
    message, after = ranks[0]
    assert ranks == [(message, after)] * WORLD and len(after) == 1
    assert message.startswith("parameter extra got a gradient on rank 1 and none on rank 0 in the same step")
    assert "requires_grad False" in message and "\n" not in message


def fp16_overflow(rank, size, settings):
    """(applied, loss scale) of three steps, the second with an overflow on rank 1; whether that one changed
    anything."""
    run = make_run(settings, fields={**SMALL, "fp16": True}, initial_loss_scale=64.0, hysteresis=1)
    spoiled = [False]
    run.model.register_forward_hook(lambda module, inputs, loss: loss * (float("inf") if spoiled[0] else 1.0))
    found, same = [], []
    for number in range(3):
        spoiled[0] = rank == 1 and number == 1
        before = [part for *_, part in run.weights()], [tensor.clone() for _, _, tensor in run.optimizer.pieces()]
        _, update = take_step(run.step, run.batches(number, 2), LR, DECAY)
        after = [part for *_, part in run.weights()], [tensor for _, _, tensor in run.optimizer.pieces()]
        same.append(
            all((a == b).all() for old, new in zip(before, after, strict=True) for a, b in zip(old, new, strict=True))
        )
        found.append((bool(update.applied), float(run.optimizer.loss_scale.value), run.optimizer.steps))
    return found, same, run.seen()


@every_strategy
def test_an_overflow_on_one_rank_is_skipped_on_all(name):
    """Neither weights nor masters nor moments move anywhere, and the next step does."""
    ranks = pool.run(WORLD, fp16_overflow, STRATEGIES[name])
    for found, same, seen in ranks:
        assert found == [(True, 64.0, 1), (False, 32.0, 1), (True, 32.0, 2)]
        assert same == [False, True, False] and seen == ranks[0][2]


def read_after_a_step(rank, size, settings, how):
    """What is seen right after a step while rank 1 is late with its slices, and what is there once all is settled."""
    run = make_run(settings, fields=TIED)
    publish = run.data_parallel.mark_updated

    def late(bucket, finish=None):
        if rank == 1:
            time.sleep(0.02)
        publish(bucket, finish)

    run.data_parallel.mark_updated = late
    x, seen = torch.ones(4, 32), []
    for number in range(2):
        take_step(run.step, run.batches(number), LR, DECAY)
        if how == "modules":
            seen.append(run.seen())
        elif how == "borrowed":  # of a module whose forward is not called, as a tied head does
            borrowed = nn.functional.linear(x, run.model.embedding.word_embeddings.weight)
            seen.append(borrowed.detach().tolist())
        else:
            seen.append(evaluate(run.model, lambda: run.batches(7), 1, run.groups))
    run.data_parallel.synchronize()
    found = whole_everywhere(run)
    exact = nn.functional.linear(x, found["embedding.word_embeddings.weight"]).tolist() if how == "borrowed" else None
    return seen, exact


def whole_everywhere(run):
    """Global parameters from all ranks' slices."""
    everything = [None] * run.groups.world.size
    torch.distributed.all_gather_object(everything, run.weights())
    return whole(everything)


@pytest.mark.parametrize("how", ["modules", "borrowed", "evaluation"])
def test_parameters_are_current_wherever_they_are_read(how):
    """The same as without overlap, bit for bit, on every rank."""
    names = [name for name in STRATEGIES if name.startswith("optim")] + ["grads, overlapped", "params"]
    (expected, exact), *_ = pool.run(WORLD, read_after_a_step, STRATEGIES["plain"], how)
    assert expected[0] != expected[1], "steps change what is read"
    if how == "borrowed":
        torch.testing.assert_close(torch.tensor(expected[1]), torch.tensor(exact))
    for name in names:
        for seen, _ in pool.run(WORLD, read_after_a_step, STRATEGIES[name], how):
            assert seen == expected, name


def few_elements(rank, size, settings):
    """Three steps on parameters that do not divide: (pieces of the weights, whether this rank owns nothing)."""
    groups = groups_for(settings)
    shapes = {"a": (3,), "b": (130,), "c": (5, 7)}
    parameters = {
        name: make_parameter(ParamSpec(shape, Init("constant", 0.0)), groups, dtype=torch.float32, device=CPU)
        for name, shape in shapes.items()
    }
    for number, parameter in enumerate(parameters.values(), start=1):
        nn.init.constant_(parameter, float(number))
    holder = Holder(parameters)
    data_parallel = DataParallel(holder, groups, DataParallelSettings(bucket_size=64, **settings), CPU)
    optimizer = make_optimizer(data_parallel, groups, optimizer="sgd", sgd_momentum=0.0, clip_grad=0.0)
    norms = []
    for number in range(3):
        data_parallel.begin_step(1)
        factors = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1) * (number + 1)
        total = sum((getattr(holder, name) * factor).sum() for name, factor in zip(shapes, factors, strict=True))
        differentiate(data_parallel, total, last=True)
        data_parallel.finish_reduction()
        norms.append(float(optimizer.step(0.5, 0.0).grad_norm))
    data_parallel.synchronize()
    owned = [
        (piece.name, piece.start, elements.tolist()) for piece, elements in data_parallel.weights() if len(elements)
    ]
    return owned, norms


@pytest.mark.parametrize("name", ["optim, overlapped", "grads, overlapped", "params"])
@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_sizes_that_do_not_divide(name, size):
    """By hand: SGD on whole numbers. Buckets smaller than a parameter, and ranks whose slices hold nothing."""
    ranks = pool.run(size, few_elements, STRATEGIES[name])
    found = {name: {} for name in "abc"}
    for owned, _ in ranks:
        for parameter, start, elements in owned:
            found[parameter] |= dict(enumerate(elements, start))
    over_ranks = size * (size + 1) / 2
    for number, (parameter, numel) in enumerate({"a": 3, "b": 130, "c": 35}.items(), start=1):
        moved = 0.5 * number * over_ranks * (1 + 2 + 3)
        assert found[parameter] == dict.fromkeys(range(numel), number - moved)
    squares = 3 * 1 + 130 * 4 + 35 * 9
    for _, norms in ranks:
        assert norms == pytest.approx([over_ranks * step * squares**0.5 for step in (1, 2, 3)], rel=1e-6)
    assert any(not owned for owned, _ in ranks) == (size > 3)


def learned(rank, size, settings):
    run = make_run(settings, fields=SMALL, bucket_size=1)
    ids = make_ids(12, 8)
    before = losses(run.model, ids).mean().item()
    run.steps(3)
    return before, losses(run.model, ids).mean().item(), len(run.data_parallel.buckets)


@pytest.mark.parametrize("name", ["optim, overlapped", "params"])
def test_five_replicas(name):
    """48 samples in shares of 10, 10, 10, 9 and 9: every rank computes, waits and ends with the same model."""
    ranks = pool.run(5, learned, STRATEGIES[name])
    assert ranks == [ranks[0]] * 5 and ranks[0][1] < ranks[0][0]
