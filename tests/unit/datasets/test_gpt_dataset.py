"""Samples of a GPTDataset: every token once an epoch, boundaries, order by (seed, number) alone, checks."""

import time

import numpy as np
import pytest

from megatron.base.errors import DataError
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.core.datasets.sample_index import build_sample_index
from tests.unit.datasets.helpers import write_documents

SEQ = 8


def numbered_documents(lengths):
    """Documents whose tokens all differ: token ids count up through the file."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end) for length, end in zip(lengths, ends)]


@pytest.fixture
def indexed(tmp_path):
    # Sequences without tokens are no part of any sample, wherever the shuffle puts them.
    with IndexedDatasetWriter(tmp_path / "set", "uint16") as writer:
        for document in numbered_documents([5, 1, 0, 30, 2, 17, 0, 8, 9, 3, 64, 1, 1, 12]):
            writer.add_document(document, [len(document)])
        writer.finalize()
    return IndexedDataset(tmp_path / "set")


def build(indexed, num_samples=None, first=0, last=None, **changes):
    settings = {"name": "train", "seq_length": SEQ, "seed": 1, "vocab_size": 1000, **changes}
    return GPTDataset(indexed, first, len(indexed) if last is None else last, num_samples=num_samples, **settings)


def stream_of(dataset, epoch=0):
    """The epoch's tokens, in the order that the samples were cut from, from the samples alone."""
    size = dataset.epoch.samples
    samples = np.stack([dataset[epoch * size + i] for i in range(size)])
    by_place = samples[np.argsort(dataset.index.shuffle[epoch])]
    assert (by_place[1:, 0] == by_place[:-1, -1]).all(), "a sample begins with the last token of the one before"
    return np.concatenate([by_place[0, :1], *by_place[:, 1:]])


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_an_epoch_reads_every_token_once_and_documents_in_order(indexed, epoch):
    dataset = build(indexed, num_samples=3 * 19)
    total = int(indexed.sequence_lengths.sum())
    assert dataset.epoch.samples == (total - 1) // SEQ == 19
    stream = stream_of(dataset, epoch)
    assert len(stream) == 19 * SEQ + 1 and len(set(stream.tolist())) == len(stream)
    # Within a document ids count up by one; documents come whole, save the last, which the epoch's end may cut.
    jumps = np.flatnonzero(np.diff(stream) != 1) + 1
    documents = {tuple(indexed.get(i).tolist()) for i in range(len(indexed))}
    pieces = [tuple(piece.tolist()) for piece in np.split(stream, jumps)]
    joined = {run for piece in pieces[:-1] for run in split_runs(piece, documents)}
    missing = documents - joined - {()}
    assert sum(map(len, missing)) - len(pieces[-1]) <= SEQ


def split_runs(piece, documents):
    """Whole documents that make up `piece`, which holds several where neighbours in the file met by chance."""
    by_start = {document[0]: document for document in documents if document}
    while piece:
        document = by_start[piece[0]]
        assert piece[: len(document)] == document
        yield document
        piece = piece[len(document) :]


def test_samples_are_read_in_another_order_than_they_are_cut(indexed):
    dataset = build(indexed, num_samples=38)
    first, second = dataset.index.shuffle
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(19))
    assert first.tolist() != sorted(first.tolist()) and first.tolist() != second.tolist()
    assert dataset.index.documents[0].tolist() != dataset.index.documents[1].tolist()


def test_sample_depends_on_seed_and_number_alone(indexed):
    long = build(indexed, num_samples=100)
    for size in (1, 7, 19, 20, 57, 99):
        short = build(indexed, num_samples=size)
        assert len(short) == size
        assert all((short[i] == long[i]).all() for i in {0, size // 2, size - 1})
    other = build(indexed, num_samples=100, seed=2)
    assert any((other[i] != long[i]).any() for i in range(19))


def test_cyclic_repeats_the_first_epoch(indexed):
    cyclic, single = build(indexed, num_samples=50, order="cyclic"), build(indexed, num_samples=50)
    assert len(cyclic.index.documents) == 1
    for i in range(50):
        assert (cyclic[i] == single[i % 19]).all()


def test_range_of_documents(indexed):
    dataset = build(indexed, first=3, last=6)
    allowed = set(np.concatenate([indexed.get(i) for i in range(3, 6)]).tolist())
    assert len(dataset) == (30 + 2 + 17 - 1) // SEQ
    assert {token for i in range(len(dataset)) for token in dataset[i].tolist()} <= allowed


def test_documents_shorter_than_a_sample_are_read_several_times(tmp_path):
    indexed = IndexedDataset(write_documents(tmp_path / "set", [[1, 2], [3]]))
    dataset = build(indexed, num_samples=4)
    assert dataset.epoch.passes == 3 and dataset.epoch.samples == 1
    for i in range(4):
        assert np.bincount(dataset[i], minlength=4).tolist() == [0, 3, 3, 3]


@pytest.mark.parametrize("total, samples", [(SEQ, 1), (SEQ + 1, 1), (2 * SEQ, 1), (2 * SEQ + 1, 2)])
def test_sample_count_at_the_boundaries(tmp_path, total, samples):
    indexed = IndexedDataset(write_documents(tmp_path / "set", [np.arange(total)]))
    dataset = build(indexed)
    assert len(dataset) == samples
    assert dataset[samples - 1].shape == (SEQ + 1,) and dataset[samples - 1].dtype == np.int64


def test_a_cached_index_gives_the_same(indexed, tmp_path):
    first = build(indexed, num_samples=30, cache=tmp_path / "cache")
    again = build(indexed, num_samples=30, cache=tmp_path / "cache")
    fresh = build(indexed, num_samples=30)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    for i in range(30):
        assert (first[i] == fresh[i]).all() and (again[i] == fresh[i]).all()


def test_cache_is_not_used_for_other_inputs(indexed, tmp_path):
    cache = tmp_path / "cache"
    build(indexed, num_samples=19, cache=cache)
    for changes in ({"seed": 2}, {"seq_length": 4}, {"num_samples": 20}, {"first": 1}):
        build(indexed, **{"num_samples": 19, "cache": cache, **changes})
    build(indexed, num_samples=18, cache=cache)  # the same epochs: the same arrays
    assert len(list(cache.iterdir())) == 5
    write_documents(indexed.prefix, numbered_documents([50, 2, 2, 99]))
    rewritten = build(IndexedDataset(indexed.prefix), num_samples=19, cache=cache)
    assert len(list(cache.iterdir())) == 6 and max(rewritten[0]) < 153


@pytest.mark.parametrize("dtype, bad", [("uint16", 1000), ("int32", 70000), ("int32", -1)])
def test_token_outside_the_vocabulary(tmp_path, dtype, bad):
    document = np.full(2 * SEQ + 1, 999, dtype)
    document[3] = bad
    with open(tmp_path / "set.bin", "wb") as file:
        file.write(document.tobytes())
    write_documents(tmp_path / "other", [np.full(len(document), 999)], dtype)
    (tmp_path / "other.idx").rename(tmp_path / "set.idx")
    dataset = build(IndexedDataset(tmp_path / "set"))
    number = int(np.flatnonzero(dataset.index.shuffle[0] == 0)[0])
    with pytest.raises(DataError, match=rf"set\.bin holds token id {bad}, outside the vocabulary of 1000; .*tokenizer"):
        dataset[number]
    assert dataset[1 - number].tolist() == [999] * (SEQ + 1)


def test_bad_ranges_types_and_numbers(indexed, tmp_path):
    with pytest.raises(DataError, match=r"documents 3 to 99 of .*set, which has 14"):
        build(indexed, first=3, last=99)
    with pytest.raises(DataError, match="hold no tokens"):
        build(indexed, first=2, last=3)
    write_documents(tmp_path / "float", [[1, 2, 3]], "float32")
    with pytest.raises(DataError, match="holds float32 values, not token ids"):
        build(IndexedDataset(tmp_path / "float"))
    dataset = build(indexed, num_samples=5)
    for number in (5, -1):
        with pytest.raises(IndexError, match=f"sample {number} of a dataset of 5"):
            dataset[number]


def test_a_million_documents_take_seconds():
    lengths = np.random.RandomState(0).randint(1, 2048, 1_000_000).astype(np.int32)
    start = time.process_time()
    index = build_sample_index(lengths, 0, len(lengths), 512, 1, seed=3)
    assert time.process_time() - start < 10
    position, offset = index.bounds[0, -1]
    read = int(lengths[index.documents[0, :position]].sum()) + int(offset)
    assert read == 512 * len(index.shuffle[0]) and 0 <= int(lengths.sum()) - 1 - read < 512
