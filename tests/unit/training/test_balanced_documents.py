"""The microbatches that documents are dealt to: nothing is lost, padding is left out, and weights stay."""

import pytest
import torch

from megatron.config.context_parallel import GroupSizes
from megatron.config.data import DataConfig
from megatron.core.datasets.sft import PADDING
from megatron.training.balanced_documents import BalancedDocuments
from megatron.training.batch import make_batch, make_sft_batch
from megatron.training.microbatches import Targets, one_token_later
from tests import pool
from tests.unit.training.conversations import make_conversations, packed

S, EOD = 32, 5


def conversations():
    """Microbatches of 2 samples, most of them with padding."""
    rows = packed(make_conversations(12, S), S, 10)
    rows[:, 1][rows[:, 2] == rows[:, 2].amax(1, keepdim=True)] = PADDING
    return [make_sft_batch(part) for part in rows.chunk(5)]


def documents():
    ids = torch.randint(0, 12, (6, S + 1), generator=torch.Generator().manual_seed(3))
    data = DataConfig(reset_attention_mask=True, eod_mask_loss=True)  # positions go on through the sample
    return [make_batch(part, EOD, data) for part in ids.chunk(3)]


def weighed(batches):
    """Targets of two depths, with a weight of its own for each token."""
    drawn = torch.Generator().manual_seed(1)
    later = [one_token_later(batch) for batch in batches]
    return [
        [Targets(x.labels, x.loss_mask, torch.rand(x.labels.shape, generator=drawn) * x.loss_mask) for x in pair]
        for pair in zip(batches, later, strict=True)
    ]


def by_document(batches, targets):
    """Columns of the tokens of each document, as a sorted list of tuples."""
    tuples = []
    for batch, depths in zip(batches, targets, strict=True):
        columns = [batch.tokens, batch.positions.expand_as(batch.tokens)]
        columns += [column for depth in depths for column in (depth.labels, depth.mask, depth.weights)]
        routed = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.routed is None else batch.routed
        for sample, lengths in enumerate(batch.segments.by_sample()):
            parts = (column[sample].split(lengths) for column in (routed, *columns))
            for tokens_routed, *numbers in zip(*parts, strict=True):
                assert tokens_routed.all() or not tokens_routed.any()
                if tokens_routed.all():
                    tuples.append(tuple(tuple(column.tolist()) for column in numbers))
    return sorted(tuples)


@pytest.mark.parametrize("make_samples", [conversations, documents])
@pytest.mark.parametrize("shards", [1, 4])
def test_every_token_arrives_with_its_numbers(make_samples, shards):
    samples = make_samples()
    targets = weighed(samples)
    sizes = GroupSizes(1, 1, 1, 2 * S, shards)
    batches, dealt = BalancedDocuments(pool.groups(contexts=(1,)), sizes, lambda n: n * n, S).shared_out(
        samples, targets
    )
    assert by_document(batches, dealt) == by_document(samples, targets)
    for batch, (target, _) in zip(batches, dealt, strict=True):
        assert batch.tokens.shape[0] == 1 and batch.tokens.shape[1] % shards == 0
        assert batch.context == 1 and batch.length == S
        assert torch.equal(batch.labels, target.labels) and torch.equal(batch.loss_mask, target.mask)
        assert (batch.tokens.shape[1] < 2 * S + shards) and sum(batch.segments.lengths) == batch.tokens.shape[1]
    padding = sum(int((~batch.routed).sum()) for batch in batches if batch.routed is not None)
    assert padding < shards * len(batches)


def test_a_rank_without_documents_has_padding_alone():
    sizes = GroupSizes(1, 1, 1, S, 2)
    empty = make_sft_batch(torch.stack([torch.zeros(S), torch.full((S,), PADDING), torch.zeros(S)]).long()[None])
    (batch,), ((target, *_),) = BalancedDocuments(pool.groups(contexts=(1,)), sizes, float, S).shared_out(
        [empty], weighed([empty])
    )
    assert (
        batch.tokens.shape == (1, 2) and not batch.routed.any() and not target.mask.any() and not target.weights.any()
    )
