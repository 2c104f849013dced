"""Megatron's file format: bytes written, tokens read, damage named, nothing half-written."""

import os
import pickle
import struct

import numpy as np
import pytest

from megatron.base.errors import DataError
from megatron.core.datasets import indexed
from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetWriter, merge_datasets, token_dtype
from tests.unit.datasets.helpers import INT32, UINT16, golden_pair, read_pair, write_documents

DOCUMENTS = [[[5, 6, 7]], [[1]], [], [[65000, 0], [3, 4, 9, 2]], [[8] * 11]]


def write(prefix, documents, dtype):
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            tokens = [token for sequence in document for token in sequence]
            writer.add_document(tokens, [len(sequence) for sequence in document])
        writer.finalize()


@pytest.mark.parametrize("kind, dtype", [(UINT16, "uint16"), (INT32, "int32")])
def test_bytes_are_those_of_the_format(tmp_path, kind, dtype):
    write(tmp_path / "set", DOCUMENTS, dtype)
    assert read_pair(tmp_path / "set") == golden_pair(DOCUMENTS, kind)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.bin", "set.idx"]


@pytest.mark.parametrize("kind", [UINT16, INT32])
def test_reads_files_made_elsewhere(tmp_path, kind):
    tokens, index = golden_pair(DOCUMENTS, kind)
    (tmp_path / "set.bin").write_bytes(tokens)
    (tmp_path / "set.idx").write_bytes(index)
    dataset = IndexedDataset(tmp_path / "set")
    sequences = [sequence for document in DOCUMENTS for sequence in document]
    assert len(dataset) == len(sequences)
    assert [dataset.get(i).tolist() for i in range(len(dataset))] == sequences
    assert dataset.document_indices.tolist() == [0, 1, 2, 2, 4, 5]
    assert dataset.get(3, 1, 2).tolist() == [4, 9]
    assert dataset.get(3, 4).tolist() == []
    with pytest.raises(IndexError, match="tokens 2 to 5 of sequence 3, which has 4"):
        dataset.get(3, 2, 3)


def test_reads_an_index_with_modes(tmp_path):
    tokens, index = golden_pair(DOCUMENTS, INT32)
    (tmp_path / "set.bin").write_bytes(tokens)
    (tmp_path / "set.idx").write_bytes(index + bytes(5))
    assert IndexedDataset(tmp_path / "set").get(1).tolist() == [1]


def test_pickle_carries_the_path_and_not_the_tokens(tmp_path):
    write_documents(tmp_path / "set", [np.arange(20000)])
    data = pickle.dumps(IndexedDataset(tmp_path / "set"))
    assert len(data) < 1000
    assert pickle.loads(data).get(0, 5, 2).tolist() == [5, 6]


def test_empty_dataset(tmp_path):
    write_documents(tmp_path / "set", [])
    assert read_pair(tmp_path / "set") == golden_pair([], UINT16)
    assert len(IndexedDataset(tmp_path / "set")) == 0


def test_token_dtype():
    assert token_dtype(65499) == np.uint16 and token_dtype(65500) == np.int32


def test_tokens_that_do_not_fit_are_refused(tmp_path):
    for bad in ([65536], [-1]):
        with pytest.raises(DataError, match=f"token ids {bad[0]} to {bad[0]} do not fit in uint16"):
            write_documents(tmp_path / "set", [[1], bad])
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_the_former_files(tmp_path):
    write_documents(tmp_path / "set", [[1, 2]])
    before = read_pair(tmp_path / "set")
    with pytest.raises(KeyboardInterrupt), IndexedDatasetWriter(tmp_path / "set", "uint16") as writer:
        writer.add_document([9] * 100)
        raise KeyboardInterrupt
    assert read_pair(tmp_path / "set") == before
    assert len(list(tmp_path.iterdir())) == 2


def damage(tmp_path, kind):
    """Write a good pair and spoil it; returns the prefix."""
    prefix = tmp_path / "set"
    write_documents(prefix, [[1, 2, 3], [4, 5]])
    tokens, index = read_pair(prefix)
    changed = {
        "magic": (tokens, b"X" + index[1:]),
        "version": (tokens, index[:9] + struct.pack("<Q", 2) + index[17:]),
        "dtype": (tokens, index[:17] + b"\x0b" + index[18:]),
        "header": (tokens, index[:20]),
        "index": (tokens, index[:-8]),
        "count": (tokens, index[:18] + struct.pack("<Q", 1 << 60) + index[26:]),
        "bounds": (tokens, index[:-8] + struct.pack("<q", 7)),
        "bin": (tokens[:-2], index),
        "stray": (tokens + b"stray", index),
        "far pointer": (tokens, index[:42] + struct.pack("<q", 800) + index[50:]),
        "negative pointer": (tokens, index[:50] + struct.pack("<q", -2) + index[58:]),
        "odd pointer": (tokens, index[:50] + struct.pack("<q", 5) + index[58:]),
        "overlap": (tokens, index[:50] + struct.pack("<q", 4) + index[58:]),
        "negative length": (tokens, index[:34] + struct.pack("<i", -3) + index[38:]),
        "last length": (tokens, index[:38] + struct.pack("<i", 1) + index[42:]),
        "falling bounds": (tokens, index[:66] + struct.pack("<q", -1) + index[74:]),
        "no bin": (None, index),
        "no idx": (tokens, None),
    }[kind]
    for ending, data in zip((".bin", ".idx"), changed):
        path = tmp_path / f"set{ending}"
        path.unlink() if data is None else path.write_bytes(data)
    return prefix


@pytest.mark.parametrize(
    "kind, message",
    [
        ("magic", r"set\.idx is not a Megatron index: it starts with b'XMIDIDX"),
        ("version", r"set\.idx has index version 2; this program reads version 1"),
        ("dtype", r"set\.idx names token type 11"),
        ("header", r"set\.idx has 20 bytes, fewer than an index's header of 34"),
        ("index", r"set\.idx has 74 bytes but 2 sequences and 3 document bounds need 82"),
        ("count", r"set\.idx has 82 bytes but 1152921504606846976 sequences"),
        ("bounds", r"set\.idx is damaged: its documents must run from sequence 0 to 2, found \[0, 7\]"),
        ("bin", r"set\.bin has 8 bytes but .*set\.idx describes 10"),
        ("stray", r"set\.bin has 15 bytes but .*set\.idx describes 10"),
        ("far pointer", r"set\.idx is damaged: sequence 0 must begin at byte 0 of the \.bin, found 800;"),
        ("negative pointer", r"set\.idx is damaged: sequence 1 must begin at byte 6 of the \.bin, found -2;"),
        ("odd pointer", r"set\.idx is damaged: sequence 1 must begin at byte 6 of the \.bin, found 5;"),
        ("overlap", r"set\.idx is damaged: sequence 1 must begin at byte 6 of the \.bin, found 4;"),
        ("negative length", r"set\.idx is damaged: sequence 0 has -3 tokens;"),
        ("last length", r"set\.bin has 10 bytes but .*set\.idx describes 8"),
        (
            "falling bounds",
            r"set\.idx is damaged: document 0 must not begin after document 1, found sequences 0 and -1;",
        ),
        ("no bin", r"set\.bin does not exist; .*tools/preprocess_data\.py"),
        ("no idx", r"set\.idx does not exist; .*tools/preprocess_data\.py"),
    ],
)
def test_damage_is_named(tmp_path, kind, message):
    with pytest.raises(DataError, match=message):
        IndexedDataset(damage(tmp_path, kind))


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path):
    """A memory map would end the process with SIGBUS here."""
    dataset = IndexedDataset(write_documents(tmp_path / "set", [np.arange(3000), np.arange(3000)]))
    assert dataset.get(1, 2998).tolist() == [2998, 2999]
    os.truncate(tmp_path / "set.bin", 100)
    with pytest.raises(DataError, match=r"set\.bin ends before tokens 0 to 3000 of sequence 1, .* at byte 6000"):
        dataset.get(1)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_damage_is_found_in_every_block_of_a_long_index(tmp_path, monkeypatch, place):
    monkeypatch.setattr(indexed, "CHECKED_AT_ONCE", 3)
    write_documents(tmp_path / "set", [[1, 2]] * 11)
    assert len(IndexedDataset(tmp_path / "set")) == 11
    _, index = read_pair(tmp_path / "set")
    at = 34 + 4 * 11 + 8 * 3 * place
    (tmp_path / "set.idx").write_bytes(index[:at] + struct.pack("<q", 1) + index[at + 8 :])
    with pytest.raises(
        DataError, match=rf"sequence {3 * place} must begin at byte {12 * place} of the \.bin, found 1;"
    ):
        IndexedDataset(tmp_path / "set")


def test_merge_is_the_same_as_writing_all(tmp_path):
    write(tmp_path / "a", DOCUMENTS[:3], "int32")
    write(tmp_path / "b", [], "int32")
    write(tmp_path / "c", DOCUMENTS[3:], "int32")
    merge_datasets([tmp_path / "a", tmp_path / "b", tmp_path / "c"], tmp_path / "all")
    assert read_pair(tmp_path / "all") == golden_pair(DOCUMENTS, INT32)


def test_merge_refuses_other_types_and_its_own_output(tmp_path):
    write_documents(tmp_path / "a", [[1]], "uint16")
    write_documents(tmp_path / "b", [[1]], "int32")
    with pytest.raises(DataError, match=r"b\.idx holds int32 tokens and .*all uint16"):
        merge_datasets([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert not list(tmp_path.glob("all*"))
    with pytest.raises(DataError, match="is one of the datasets to merge"):
        merge_datasets([tmp_path / "a"], tmp_path / "a")
