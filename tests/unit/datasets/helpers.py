"""Small datasets, and the file format spelled out without the code under test."""

import struct

from megatron.core.datasets.indexed import IndexedDatasetWriter

UINT16, INT32 = (8, "H"), (4, "i")  # code in the index, struct's letter


def golden_pair(documents, kind):
    """Bytes of `.bin` and `.idx` for documents given as lists of sequences of token ids."""
    code, letter = kind
    sequences = [sequence for document in documents for sequence in document]
    tokens = b"".join(struct.pack(f"<{len(s)}{letter}", *s) for s in sequences)
    width = struct.calcsize(letter)
    pointers, bounds, at = [], [0], 0
    for sequence in sequences:
        pointers.append(at)
        at += width * len(sequence)
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<QQ", len(sequences), len(documents) + 1)
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *pointers)
    index += struct.pack(f"<{len(bounds)}q", *bounds)
    return tokens, index


def write_documents(prefix, documents, dtype="uint16"):
    """A dataset of one sequence a document."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
        writer.finalize()
    return str(prefix)


def read_pair(prefix):
    """Bytes of `.bin` and `.idx`."""
    with open(f"{prefix}.bin", "rb") as tokens, open(f"{prefix}.idx", "rb") as index:
        return tokens.read(), index.read()
