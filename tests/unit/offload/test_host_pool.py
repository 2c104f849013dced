"""Host memory: blocks of exact size that are reused, their tensors, and files."""

import mmap

import pytest
import torch

from megatron.base.errors import ConfigError
from megatron.core.offload.host_pool import HostPool


def test_blocks_are_of_exact_size_and_reused():
    pool = HostPool(pinned=False)
    one, two = pool.take(1001), pool.take(3000)
    assert (one.nbytes, two.nbytes, pool.nbytes) == (1001, 3000, 4001)
    pool.give_back(one)
    pool.give_back(two)
    assert pool.take(900) is one and pool.take(900) is two and pool.num_allocated == 2


def test_sizes_that_change_do_not_pile_up():
    pool = HostPool(pinned=False)
    for nbytes in range(1000, 5000, 100):
        pool.give_back(pool.take(nbytes))
    assert pool.nbytes == 4900


def test_a_discarded_block_is_not_reused():
    pool = HostPool(pinned=False)
    block = pool.take(100)
    pool.discard(block)
    assert pool.nbytes == 0 and pool.take(100) is not block


def test_tensors_lie_one_behind_the_other():
    pool = HostPool(pinned=False)
    block, tensors = pool.take_tensors({"a": (64, torch.bfloat16), "b": (8, torch.uint8), "c": (4, torch.float32)})
    assert block.nbytes == pool.nbytes == 128 + 8 + 16
    for number, tensor in enumerate(tensors.values(), start=1):
        tensor.fill_(number)
    assert [(len(t), t.dtype, t.tolist()[-1]) for t in tensors.values()] == [
        (64, torch.bfloat16, 1.0),
        (8, torch.uint8, 2),
        (4, torch.float32, 3.0),
    ]


class TestFiles:
    def test_they_hold_what_is_written_and_have_no_name(self, tmp_path):
        pool = HostPool(pinned=False, directory=tmp_path)
        block = pool.take(5000)
        block.bytes.copy_(torch.arange(5000) % 251)
        block.write_back()
        block.read_ahead()
        assert torch.equal(block.bytes, (torch.arange(5000) % 251).to(torch.uint8))
        assert list(tmp_path.iterdir()) == [], "a file without a name is gone with its process"

    def test_a_missing_folder(self, tmp_path):
        with pytest.raises(ConfigError, match=r"--offload-dir .*nowhere is not a folder; make it"):
            HostPool(pinned=False, directory=tmp_path / "nowhere")

    def test_too_little_room(self, tmp_path):
        with pytest.raises(ConfigError, match=rf"has \d+ bytes free and this rank offloads {2**62};"):
            HostPool(pinned=False, directory=tmp_path, needed=2**62)

    def test_a_disk_that_becomes_full(self, tmp_path, monkeypatch):
        pool = HostPool(pinned=False, directory=tmp_path)

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("megatron.core.offload.host_pool.os.posix_fallocate", full)
        with pytest.raises(ConfigError, match=rf"cannot hold {mmap.PAGESIZE} more bytes \(No space left on device\)"):
            pool.take(mmap.PAGESIZE)
