"""Samples of conversations: each once an epoch, whole, in an order of (seed, number) alone; packed or not; blended."""

import logging
import shutil

import numpy as np
import pytest

from megatron.base.errors import DataError
from megatron.config.data import DataConfig
from megatron.core.datasets.build import build_datasets
from megatron.core.datasets.indexed import IndexedDatasetWriter
from megatron.core.datasets.sample import Splits
from megatron.core.datasets.sft import PADDING, Conversations, SFTDataset, mask_prefix
from tests.unit.datasets.helpers import write_documents

SEQ = 16
LENGTHS = np.random.RandomState(0).randint(2, 13, 80).tolist()


def write_conversations(prefix, lengths=LENGTHS, first_id=0):
    """Conversation i has the tokens first_id + 100 i, + 1, ...; every third is trained on, and the very first one,
    too."""
    with (
        IndexedDatasetWriter(prefix, "<i4") as tokens,
        IndexedDatasetWriter(mask_prefix(prefix), "u1") as mask,
    ):
        for number, length in enumerate(lengths):
            tokens.add_document(first_id + 100 * number + np.arange(length))
            mask.add_document((np.arange(length) % 3 == 0) | (np.arange(length) == length - 1))
        tokens.finalize()
        mask.finalize()
    return str(prefix)


@pytest.fixture
def prefix(tmp_path):
    return write_conversations(tmp_path / "chat")


def build(prefix, num_samples=None, first=0, last=None, **changes):
    data = Conversations(prefix)
    settings = {"name": "train", "seq_length": SEQ, "seed": 1, "vocab_size": 10**6, "packing": True, **changes}
    return SFTDataset(data, first, len(data) if last is None else last, num_samples=num_samples, **settings)


def conversations_of(rows):
    """{number of a conversation: (its tokens, its mask)} in one sample, and how many places are filled up."""
    found, filling = {}, 0
    for segment in range(rows[2].max() + 1):
        here = rows[2] == segment
        places = np.flatnonzero(here)
        assert (np.diff(places) == 1).all(), "a conversation lies in one piece"
        tokens, mask = rows[0][here], rows[1][here]
        if (mask == PADDING).any():
            assert (mask == PADDING).all() and not tokens.any()
            assert segment == rows[2].max() and places[-1] == len(here) - 1
            filling = len(tokens)
        else:
            found[int(tokens[0]) // 100] = (tokens.tolist(), mask.tolist())
    return found, filling


def epoch_of(dataset, epoch=0):
    """[{conversation: ...}] of an epoch's samples."""
    first = epoch * dataset.epoch_samples
    return [conversations_of(dataset[first + i])[0] for i in range(dataset.epoch_samples)]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_an_epoch_reads_each_conversation_once_and_whole(prefix, packing, epoch):
    prefix = write_conversations(prefix, first_id=100)  # so that id 0 is the filling alone
    dataset = build(prefix, num_samples=300, packing=packing)
    samples = epoch_of(dataset, epoch)
    merged = {number: pair for sample in samples for number, pair in sample.items()}
    assert sum(map(len, samples)) == len(merged) == len(LENGTHS)
    for number, (tokens, mask) in merged.items():
        length = LENGTHS[number - 1]
        assert tokens == list(range(100 * number, 100 * number + length))
        # The first token has nothing before it to be predicted from.
        assert mask == [int(i > 0 and (i % 3 == 0 or i == length - 1)) for i in range(length)]
    if not packing:
        assert all(len(sample) == 1 for sample in samples)


def test_packing_fills_the_samples(prefix):
    packed, alone = build(prefix), build(prefix, packing=False)
    assert packed.efficiency == pytest.approx(sum(LENGTHS) / (len(packed) * SEQ)) and packed.efficiency > 0.9
    assert len(alone) == len(LENGTHS) and alone.efficiency == pytest.approx(sum(LENGTHS) / (len(LENGTHS) * SEQ))


@pytest.mark.parametrize("lengths", [[SEQ], [SEQ, SEQ, 5], [SEQ - 1, 1 + 1]])
def test_a_conversation_may_fill_a_sample(tmp_path, lengths):
    dataset = build(write_conversations(tmp_path / "full", lengths, first_id=100))
    found = [conversations_of(dataset[i]) for i in range(len(dataset))]
    assert sorted(len(tokens) for sample, _ in found for tokens, _ in sample.values()) == sorted(lengths)
    assert sum(filling for _, filling in found) == SEQ * len(dataset) - sum(lengths)


@pytest.mark.parametrize("packing", [True, False])
def test_a_sample_depends_on_the_seed_and_its_number_alone(prefix, packing):
    short, long = build(prefix, 5, packing=packing), build(prefix, 400, packing=packing)
    assert all((short[i] == long[i]).all() for i in range(5))
    other = build(prefix, 5, seed=2, packing=packing)
    assert any((short[i] != other[i]).any() for i in range(5))


def test_epochs_differ_and_cyclic_repeats_the_first(prefix):
    dataset = build(prefix, 200)
    size = dataset.epoch_samples
    together = [{frozenset(sample) for sample in epoch_of(dataset, epoch)} for epoch in range(2)]
    assert together[0] != together[1], "conversations meet others"
    cyclic = build(prefix, 200, order="cyclic")
    assert all((cyclic[i] == cyclic[i + size]).all() and (cyclic[i] == dataset[i]).all() for i in range(size))


def test_a_range_of_conversations(prefix):
    samples = epoch_of(build(prefix, first=20, last=50))
    assert sorted(number for sample in samples for number in sample) == list(range(20, 50))


def test_index_is_kept_and_read_again(prefix, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = build(prefix, 200, cache=cache)
    monkeypatch.setattr("megatron.core.datasets.sft.best_fit_decreasing", None)
    again, longer = build(prefix, 200, cache=cache), build(prefix, 900, cache=cache)
    assert all((first[i] == again[i]).all() and (first[i] == longer[i]).all() for i in range(200))
    monkeypatch.undo()
    plain = build(prefix, 200)
    assert all((first[i] == plain[i]).all() for i in range(200))
    assert (build(prefix, 200, cache=cache, packing=False)[0][2] <= 1).all(), "another entry"


def test_longer_conversations_are_left_out_and_counted(prefix, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    caplog.set_level(logging.INFO)
    samples = epoch_of(build(prefix, seq_length=8))
    short = [number for number, length in enumerate(LENGTHS) if length <= 8]
    assert sorted(number for sample in samples for number in sample) == short
    assert f"{len(LENGTHS) - len(short)} of {len(LENGTHS)} conversations of {prefix} are longer than" in caplog.text
    assert "packing efficiency" in caplog.text
    with pytest.raises(DataError, match=r"none of the 80 .* fits in --seq-length 1: the shortest has 2 tokens"):
        build(prefix, seq_length=1)


def test_ids_outside_the_vocabulary(prefix):
    dataset = build(prefix, vocab_size=500)
    with pytest.raises(DataError, match=r"holds token id .*, outside the vocabulary of 500"):
        for i in range(len(dataset)):
            dataset[i]


class TestFiles:
    def test_documents_are_no_conversations(self, tmp_path):
        plain = write_documents(tmp_path / "plain", [[1, 2, 3]])
        with pytest.raises(DataError, match=r"plain_mask\.idx does not exist, so .* tools/preprocess_sft\.py"):
            Conversations(plain)
        with pytest.raises(DataError, match=r"none\.idx does not exist"):
            Conversations(str(tmp_path / "none"))

    def test_types(self, prefix, tmp_path):
        wrong = write_documents(tmp_path / "wrong", [[1] * length for length in LENGTHS])
        for suffix in ("bin", "idx"):
            shutil.copy(f"{mask_prefix(prefix)}.{suffix}", f"{mask_prefix(wrong)}.{suffix}")
        with pytest.raises(DataError, match="wrong holds uint16 values where an instruction dataset has int32"):
            Conversations(wrong)

    def test_a_mask_of_other_conversations(self, prefix, tmp_path):
        other = write_conversations(tmp_path / "other", LENGTHS[::-1])
        for suffix in ("bin", "idx"):
            shutil.copy(f"{mask_prefix(other)}.{suffix}", f"{mask_prefix(prefix)}.{suffix}")
        with pytest.raises(DataError, match=r"is not the mask of .*: the conversations have other lengths"):
            Conversations(prefix)

    def test_a_mark_that_is_neither_0_nor_1(self, prefix):
        with open(f"{mask_prefix(prefix)}.bin", "r+b") as file:
            file.write(b"\x40" * 4)
        dataset = build(prefix)
        with pytest.raises(DataError, match=r"chat_mask\.bin is damaged: conversation 0 has mark 64, which is neither"):
            for i in range(len(dataset)):
                dataset[i]


class TestBuild:
    def build(self, sizes=(80, 20, None), seed=1, **flags):
        config = DataConfig(seq_length=SEQ, sft=True, **flags)
        return build_datasets(config, Splits(*sizes), seed, 10**6)

    def test_splits(self, prefix):
        built = self.build(data_path=(prefix,), split="75,25,0")
        assert built.test is None and (len(built.train), len(built.valid)) == (80, 20)
        assert {n for sample in epoch_of(built.train) for n in sample} == set(range(60))
        assert {n for sample in epoch_of(built.valid) for n in sample} == set(range(60, 80))

    def test_no_packing(self, prefix):
        built = self.build(data_path=(prefix,), split="1", sft_packing=False)
        assert len(epoch_of(built.train)) == len(LENGTHS)

    def test_blend(self, prefix, tmp_path):
        other = write_conversations(tmp_path / "other", first_id=50_000)
        built = self.build(sizes=(400, None, None), train_data_path=("3", prefix, "1", other))
        samples = [conversations_of(built.train[i])[0] for i in range(400)]
        share = [min(sample) < 500 for sample in samples]
        assert sum(share) == 300
        # Each of them reads its own conversations once an epoch.
        size = built.train.datasets[1].epoch_samples
        own = [n for sample, first in zip(samples, share, strict=True) if not first for n in sample]
        assert size < 100 and sorted(own[: len(LENGTHS)]) == list(range(500, 580))

    def test_pretraining_reads_the_tokens_alone(self, prefix):
        """The tokens are an ordinary dataset."""
        built = build_datasets(
            DataConfig(seq_length=SEQ, data_path=(prefix,), split="1"), Splits(5, None, None), 1, 10**6
        )
        assert built.train[0].shape == (SEQ + 1,)
