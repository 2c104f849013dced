"""Where documents start: against a loop over tokens, and with padding behind the samples."""

import pytest
import torch
import torch.nn.functional as F

from megatron.kernels.ops.attention_segments import Segments, ids_of, segments_of

CPU = torch.device("cpu")
IDS = {
    "one": [[3] * 6],
    "several": [[0, 0, 1, 2, 2, 2]],
    "same numbers in neighbouring samples": [[0, 0, 0, 1, 1, 1], [1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]],
    "one token": [[4], [4], [5]],
    "all alone": [[0, 1, 2, 3], [4, 3, 2, 1]],
}


def slow(rows):
    """Lengths of the documents, one token after the other."""
    lengths = []
    for row in rows:
        for place, number in enumerate(row):
            if place and row[place - 1] == number:
                lengths[-1] += 1
            else:
                lengths.append(1)
    return lengths


@pytest.mark.parametrize("rows", IDS.values(), ids=IDS)
@pytest.mark.parametrize("padding", [0, 1, 5])
def test_starts_and_lengths(rows, padding):
    ids = torch.tensor(rows)
    longer = F.pad(ids, (0, padding), value=-1)
    segments = segments_of(ids, CPU).padded(longer)
    lengths = slow(longer.tolist())
    assert segments.ids.equal(longer) and segments.lengths == tuple(lengths)
    assert segments.starts.tolist() == [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    assert segments.starts.dtype == torch.int32
    assert [x.data_ptr() for x in segments.tensors] == [segments.ids.data_ptr(), segments.starts.data_ptr()]


def test_ids_alone():
    """Of a cache: kernels mask."""
    ids = torch.zeros(1, 3, dtype=torch.long)
    segments = Segments(ids)
    assert segments.starts is None and segments.tensors == [ids]
    assert ids_of(segments) is ids and ids_of(None) is None
