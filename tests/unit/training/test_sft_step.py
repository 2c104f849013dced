"""Instruction data in a step: the batch by rules written out, and one objective, packed or not, in any microbatches."""

import dataclasses

import pytest
import torch

from megatron.config.data import DataConfig
from megatron.kernels import choose
from megatron.kernels.choose_attention import choose_attention
from megatron.kernels.ops import attention, attention_packed
from megatron.training.batch import BatchReader, make_batch, make_sft_batch
from megatron.training.logging.timers import Timers
from megatron.training.step import TrainStep, evaluate, token_weights
from tests import pool
from tests.unit.kernels.variable_length import VariableLengthOperator
from tests.unit.models.builds import (
    CPU,
    GPT,
    LLAMA,
    assert_gradients,
    gradients,
    make_data_parallel,
    make_ids,
    make_model,
    make_optimizer,
)
from tests.unit.training.conversations import alone, make_conversations, packed, sample_of

S = 32
CONVERSATIONS = make_conversations(12, S)
# As many samples as there is room for, and more, so that one is nearly empty.
LAYOUTS = {
    "packed": (packed(CONVERSATIONS, S, 8), [8]),
    "packed, in microbatches": (packed(CONVERSATIONS, S, 8), [1, 3, 4]),
    "packed loosely": (packed(CONVERSATIONS, S, 10), [5, 5]),
    "one a sample": (alone(CONVERSATIONS, S), [12]),
    "one a sample, in microbatches": (alone(CONVERSATIONS, S), [4, 4, 4]),
    "one a sample, longer": (alone(CONVERSATIONS, 2 * S), [12]),
}


def slow(rows):
    """(labels, mask, positions) of one sample [3, s], one token after the other; None where the label is nothing."""
    tokens, trained, segments = rows.tolist()
    labels, mask, positions = [], [], []
    for place, segment in enumerate(segments):
        goes_on = place + 1 < len(segments) and segments[place + 1] == segment
        labels.append(tokens[place + 1] if goes_on else None)
        mask.append(bool(goes_on and trained[place + 1]))
        begins = place == 0 or segments[place - 1] != segment
        positions.append(0 if begins else positions[-1] + 1)
    return labels, mask, positions


class TestBatch:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_against_the_rules(self, layout):
        rows, _ = LAYOUTS[layout]
        batch = make_sft_batch(rows)
        assert batch.by_segment and batch.loss_mask.dtype == torch.bool
        assert batch.tokens.equal(rows[:, 0]) and batch.segments.ids.equal(rows[:, 2])
        assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
        for number, sample in enumerate(rows):
            labels, mask, positions = slow(sample)
            assert batch.loss_mask[number].tolist() == mask and batch.positions[number].tolist() == positions
            found = batch.labels[number].tolist()
            assert all(own is None or own == other for own, other in zip(labels, found, strict=True))

    def test_a_conversation_that_fills_the_sample(self):
        (conversation,) = [(torch.arange(1, S + 1), torch.ones(S, dtype=torch.bool))]
        batch = make_sft_batch(sample_of([conversation], S).unsqueeze(0))
        assert batch.loss_mask[0].tolist() == [True] * (S - 1) + [False]
        assert batch.positions[0].tolist() == list(range(S)) and batch.segments.ids.eq(0).all()

    def test_reader(self):
        rows = packed(CONVERSATIONS, S, 8)
        data = DataConfig(seq_length=S, sft=True)
        loader = iter(rows.split(2))
        reader = BatchReader(loader, data, eod=0, micro_batch_size=2, groups=pool.groups(), device=CPU)
        batches = [*reader.read(3), *reader.read(1)]
        assert torch.cat([batch.tokens for batch in batches]).equal(rows[:, 0])
        assert all(batch.by_segment for batch in batches)
        for batch in batches:
            changes = [1 + int((ids[1:] != ids[:-1]).sum()) for ids in batch.segments.ids]
            assert len(batch.segments.lengths) == sum(changes) and sum(batch.segments.lengths) == batch.tokens.numel()


def setting(fields=LLAMA, *, per_token=False):
    groups = pool.groups()
    model = make_model(fields, groups, spread=0.1)
    data_parallel = make_data_parallel(model, groups)
    owner = make_optimizer(data_parallel, groups)
    step = TrainStep(model, data_parallel, owner, groups, Timers(0, lambda: None), per_token=per_token)
    return data_parallel, step


def direct(model, per_token):
    """The formulas of the note in step.py, of every conversation by itself, without any filling."""
    sums, counts = [], []
    for tokens, trained in CONVERSATIONS:
        positions = torch.arange(len(tokens) - 1).unsqueeze(0)
        per = model(tokens[None, :-1], positions, labels=tokens[None, 1:])[0]
        mask = trained[1:]
        sums.append((per * mask).sum())
        counts.append(mask.sum())
    if per_token:
        return sum(sums) / sum(counts)
    return sum(total / count for total, count in zip(sums, counts, strict=True)) / len(sums)


@pytest.mark.parametrize("fields", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_objective_and_gradient(fields, per_token, layout):
    rows, sizes = LAYOUTS[layout]
    data_parallel, step = setting(fields, per_token=per_token)
    loss = step.forward_backward([make_sft_batch(part) for part in rows.split(sizes)]).read()
    plain = make_model(fields, pool.groups(), spread=0.1)
    expected = direct(plain, per_token)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_gradients(gradients(data_parallel), {n: p.grad for n, p in plain.named_parameters()})


def of_a_gpu(kernel):
    """Chooses `kernel` for whole sequences."""
    return lambda *args, **options: dataclasses.replace(choose_attention(*args, **options), attention=kernel)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_mask(monkeypatch, layout):
    """The kernels of a GPU: conversations in one call, by a stand-in for its operator, or one after the other."""
    rows, sizes = LAYOUTS[layout]
    found = []
    for by_flash in (None, True, False):
        with monkeypatch.context() as patched:
            if by_flash is not None:
                kernel = attention_packed.packed(attention.fused, by_flash=by_flash)
                patched.setattr(choose, "choose_attention", of_a_gpu(kernel))
            data_parallel, step = setting({**LLAMA, "num_attention_heads": 4})
        with VariableLengthOperator() as operator:
            loss = step.forward_backward([make_sft_batch(part) for part in rows.split(sizes)]).read()
        assert (operator.calls > 0) == (by_flash is True)
        found.append((loss, gradients(data_parallel)))
    (masked, expected), *others = found
    for loss, gradient in others:
        assert loss == pytest.approx(masked, rel=1e-5)
        assert_gradients(gradient, expected)


def test_the_two_weightings_differ():
    model = make_model(LLAMA, pool.groups())
    assert direct(model, True).item() != pytest.approx(direct(model, False).item(), rel=1e-3)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_sum_to_one_however_packed(per_token, layout):
    rows, sizes = LAYOUTS[layout]
    batches = [make_sft_batch(part) for part in rows.split(sizes)]
    weights = token_weights(batches, pool.groups(), per_token)
    assert float(sum(w.sum() for w in weights)) == pytest.approx(1.0)
    assert all(w[~batch.loss_mask].eq(0).all() for w, batch in zip(weights, batches, strict=True))
    if not per_token:
        shares = [
            float(w[n][segments == segment].sum())
            for w, batch in zip(weights, batches, strict=True)
            for n, segments in enumerate(batch.segments.ids)
            for segment in segments[batch.loss_mask[n]].unique()
        ]
        assert shares == pytest.approx([1 / len(CONVERSATIONS)] * len(CONVERSATIONS))


def test_nothing_to_learn_at_all():
    batch = make_sft_batch(sample_of([], S).unsqueeze(0))
    for per_token in (True, False):
        (weights,) = token_weights([batch], pool.groups(), per_token)
        assert weights.eq(0).all()


def test_documents_weigh_by_sample_with_attention_inside_them():
    """Segments alone do not make a batch of conversations."""
    data = DataConfig(eod_mask_loss=True, reset_attention_mask=True, reset_position_ids=True)
    batch = make_batch(make_ids(6, S), 5, data)
    (weights,) = token_weights([batch], pool.groups(), False)
    assert weights.equal(batch.loss_mask / (batch.loss_mask.sum(dim=1, keepdim=True) * 6))


def test_evaluation_is_the_mean_over_tokens():
    model = make_model(LLAMA, pool.groups(), spread=0.1)
    for rows in (packed(CONVERSATIONS, S, 8), alone(CONVERSATIONS, S)):
        loss = evaluate(model, lambda: [make_sft_batch(rows)], 1, pool.groups())  # noqa: B023
        assert loss == pytest.approx(direct(model, True).item(), rel=1e-5)
