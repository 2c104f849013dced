import json

import pytest
import torch
from safetensors.torch import load_file

import megatron.core.dist_checkpointing.tensor_file as tensor_file
from megatron.core.dist_checkpointing.boxes import Box
from megatron.core.dist_checkpointing.tensor_file import DTYPE_CODES, DamagedError, TensorSource, open_tensor_file
from tests.unit.dist_checkpointing.pieces import same


def write(path, tensors):
    sources = [TensorSource(key, t.dtype, tuple(t.shape), lambda t=t: t) for key, t in tensors.items()]
    return tensor_file.write_tensor_file(path, sources)


def test_the_safetensors_library_reads_every_dtype(tmp_path):
    tensors = {
        str(dtype): (torch.randn(3, 5) * 50).to(dtype) for dtype in sorted(DTYPE_CODES, key=lambda d: d.itemsize)
    }
    tensors |= {"scalar": torch.tensor(3.5), "strided": torch.randn(4, 6).t(), "none": torch.zeros(0, 3)}
    write(tmp_path / "f.safetensors", tensors)
    loaded = load_file(tmp_path / "f.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(same(loaded[key], tensor) for key, tensor in tensors.items())
    # Odd sizes: a one-byte tensor in front of a wide one would leave the wide one misaligned.
    raw = (tmp_path / "f.safetensors").read_bytes()
    data = 8 + int.from_bytes(raw[:8], "little")
    starts = {key: data + entry["data_offsets"][0] for key, entry in json.loads(raw[8:data]).items()}
    assert all(starts[key] % tensor.element_size() == 0 for key, tensor in tensors.items())


def test_a_slice_checks_only_the_blocks_it_touches(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 64)
    path, data = tmp_path / "f.safetensors", torch.randn(32, 8)  # a row is 32 bytes, a block two rows
    crc32 = write(path, {"w": data})["w"]
    assert len(crc32) == 16
    raw = bytearray(path.read_bytes())
    raw[-32 * 8 * 4 + 10 * 32 + 5] ^= 1  # row 10
    path.write_bytes(raw)
    with open_tensor_file(path, len(raw)) as file:

        def read(offset, shape):
            return file.read("w", torch.float32, (32, 8), crc32, Box(offset, shape))

        assert same(read((0, 0), (10, 8)), data[:10])
        assert same(read((12, 3), (20, 2)), data[12:, 3:5])
        for offset, shape in (((0, 0), (32, 8)), ((10, 7), (1, 1)), ((11, 0), (1, 8)), ((0, 0), (13, 1))):
            with pytest.raises(DamagedError, match=r"f\.safetensors is damaged: tensor w .* in its block 5"):
                read(offset, shape)
