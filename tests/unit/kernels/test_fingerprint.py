import pytest
import torch

from megatron.kernels.ops.fingerprint import fingerprint

WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64, torch.int8: torch.int8}


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1000])
def test_every_bit_counts(dtype, start, size):
    torch.manual_seed(size)
    x = (torch.randn(start + size) * 50).to(dtype)[start:]
    before, bits = fingerprint(x), x.view(WORDS[dtype])
    for index in {0, size // 2, size - 1}:
        for bit in range(8 * x.itemsize):
            flip = torch.tensor(1 << bit if bit < 8 * x.itemsize - 1 else -(1 << bit), dtype=WORDS[dtype])
            bits[index] ^= flip
            assert fingerprint(x) != before
            bits[index] ^= flip
    assert fingerprint(x) == before == fingerprint(x.clone())


def test_places_count_and_so_do_nans():
    x = torch.arange(200.0)
    swapped = x.clone()
    swapped[[3, 100]] = swapped[[100, 3]]
    assert fingerprint(x) != fingerprint(swapped)
    x[5] = torch.nan
    assert fingerprint(x) == fingerprint(x.clone())
    assert fingerprint(torch.empty(0)) == 0
    assert fingerprint(torch.tensor(1.0)).shape == ()
