import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron.core.dist_checkpointing.tensor_file as tensor_file
from megatron.base.box import Box
from megatron.core.dist_checkpointing.tensor_file import (
    DTYPE_CODES,
    DamagedError,
    TensorFile,
    TensorSource,
    open_tensor_file,
)
from tests.unit.dist_checkpointing.pieces import same


def write(path, tensors):
    sources = [TensorSource(key, t.dtype, tuple(t.shape), lambda t=t: [t]) for key, t in tensors.items()]
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
    file = open_tensor_file(path, len(raw))

    def read(offset, shape):
        return file.read("w", torch.float32, (32, 8), crc32, Box(offset, shape))

    assert same(read((0, 0), (10, 8)), data[:10])
    assert same(read((12, 3), (20, 2)), data[12:, 3:5])
    for offset, shape in (((0, 0), (32, 8)), ((10, 7), (1, 1)), ((11, 0), (1, 8)), ((0, 0), (13, 1))):
        with pytest.raises(DamagedError, match=r"f\.safetensors is damaged: tensor w .* in its block 5"):
            read(offset, shape)


def test_checksums_do_not_depend_on_the_blocks_that_come_in(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 64)
    data = torch.randn(32, 8)
    whole = write(tmp_path / "whole", {"w": data})
    for rows in (1, 3, 5, 32):
        source = TensorSource("w", data.dtype, tuple(data.shape), lambda rows=rows: data.split(rows))
        assert tensor_file.write_tensor_file(tmp_path / str(rows), [source]) == whole
        assert (tmp_path / str(rows)).read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_file_of_the_library_is_read(tmp_path):
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "none": torch.zeros(0, 2)}
    save_file(tensors, tmp_path / "f.safetensors", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "f.safetensors")
    assert file.entries.keys() == tensors.keys() and file.metadata == {"format": "pt"}
    assert all(same(file.view(key), tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda raw: raw[:-1], "bytes and its header says"),
        (lambda raw: raw + b"x", "bytes and its header says"),
        (lambda raw: b"\xff" * 8 + raw[8:], "its header would be"),
        (lambda raw: raw[:8] + b"}" + raw[9:], "Expecting value"),
        (lambda raw: raw.replace(b"F32", b"F39"), "unknown or missing 'F39'"),
        (lambda raw: raw.replace(b"[3,5]", b"[3,4]"), "of shape [3, 4] has 60 bytes"),
        (lambda raw: b"", "Expecting value"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path, change, reason):
    path = tmp_path / "f.safetensors"
    write(path, {"w": torch.randn(3, 5)})
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DamagedError, match=rf"f\.safetensors is damaged.*{re.escape(reason)}"):
        TensorFile(path)


@pytest.mark.parametrize(
    ("offsets", "reason"),
    [
        ({"a": [0, 24], "b": [0, 24], "c": [24, 48]}, "tensor b begins at byte 0 where 24 is the next"),
        ({"a": [0, 24], "b": [16, 40], "c": [24, 48]}, "tensor b begins at byte 16 where 24 is the next"),
        ({"a": [0, 24], "b": [-24, 0], "c": [24, 72]}, "tensor b has offsets [-24, 0]"),
        ({"a": [0, 24], "b": [24.0, 48.0], "c": [48, 72]}, "tensor b has offsets [24.0, 48.0]"),
        ({"a": [0, 24], "b": [48, 24], "c": [48, 72]}, "tensor b of shape [6] has -24 bytes"),
        ({"a": [0, 24], "b": [25, 49], "c": [48, 72]}, "tensor b begins at byte 25 where 24 is the next"),
        ({"a": [0, 24], "b": [48, 72], "c": [72, 96]}, "tensor b begins at byte 48 where 24 is the next"),
    ],
)
def test_offsets_must_fill_the_file_without_overlap(tmp_path, offsets, reason):
    write_header(tmp_path / "f.safetensors", {key: ([6], pair) for key, pair in offsets.items()}, bytes(72))
    with pytest.raises(DamagedError, match=rf"f\.safetensors is damaged.*{re.escape(reason)}"):
        TensorFile(tmp_path / "f.safetensors")


@pytest.mark.parametrize("shape", [[-2, -3], [6.0], [True, 6], "6", None])
def test_a_shape_is_a_list_of_sizes(tmp_path, shape):
    write_header(tmp_path / "f.safetensors", {"a": (shape, [0, 24])}, bytes(24))
    with pytest.raises(DamagedError, match=r"f\.safetensors is damaged.*tensor a has shape"):
        TensorFile(tmp_path / "f.safetensors")


@pytest.mark.parametrize("name", ["[1, 2]", "null", '{"__metadata__": 3}', '{"__metadata__": {"a": 1}}', '{"a": null}'])
def test_a_header_of_another_kind_is_damage(tmp_path, name):
    text = name.encode()
    (tmp_path / "f.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(DamagedError, match=r"f\.safetensors is damaged"):
        TensorFile(tmp_path / "f.safetensors")


def write_header(path, tensors, data):
    entries = {key: {"dtype": "F32", "shape": shape, "data_offsets": pair} for key, (shape, pair) in tensors.items()}
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
