"""Folders of torch.distributed.checkpoint that one process streams: torch itself reads them."""

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.base.box import Box
from megatron.core.dist_checkpointing import dcp_writer
from megatron.core.dist_checkpointing.dcp_writer import write_dcp
from megatron.core.dist_checkpointing.whole import WholeTensor

TENSORS = {
    "stacked": torch.arange(4 * 6 * 5.0).view(4, 6, 5),
    "half": torch.randn(7, 3, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "vector": torch.arange(11.0),
}


def whole(name, tensor, asked=None):
    def read(box):
        if asked is not None:
            asked.append((name, box))
        return tensor[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape))].clone()

    return WholeTensor(name, tensor.dtype, tuple(tensor.shape), read)


@pytest.mark.parametrize(("chunk_bytes", "file_bytes"), [(2**26, 2**30), (40, 100)])
def test_torch_reads_what_is_written(tmp_path, monkeypatch, chunk_bytes, file_bytes):
    monkeypatch.setattr(dcp_writer, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(dcp_writer, "FILE_BYTES", file_bytes)
    done, asked = [], []
    tensors = [whole(name, tensor, asked) for name, tensor in TENSORS.items()]
    write_dcp(tmp_path, tensors, {"object/shard_0_1": [{"a": 1}]}, done.append)
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()} | {"object/shard_0_1": io.BytesIO()}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor), name
    assert found["object/shard_0_1"] == [{"a": 1}]
    assert sum(done) == sum(tensor.nbytes for tensor in TENSORS.values())
    largest = max(box.numel * TENSORS[name].element_size() for name, box in asked)
    assert largest <= chunk_bytes
    assert len(list(tmp_path.glob("*.distcp"))) == (2 if file_bytes > 100 else 3)  # with that of the objects


def test_nothing_in_it_names_its_folder(tmp_path):
    write_dcp(tmp_path, [whole("vector", TENSORS["vector"])], {})
    assert str(tmp_path).encode() not in (tmp_path / ".metadata").read_bytes()


def test_a_failing_read_is_raised_and_the_folder_stays_incomplete(tmp_path):
    def read(box: Box):
        raise OSError(28, "No space left on device")

    broken = WholeTensor("broken", torch.float32, (3,), read)
    with pytest.raises(OSError, match="No space left"):
        write_dcp(tmp_path, [whole("vector", TENSORS["vector"]), broken], {})
    assert not (tmp_path / ".metadata").exists()
