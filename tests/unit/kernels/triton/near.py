"""Comparison of a kernel in Triton's interpreter with its reference."""

import torch

TOLERANCE = 1e-6  # of the largest element: both sum in fp32, in another order


def assert_near(found, expected, tolerance=TOLERANCE):
    """Shapes and dtypes are equal, and so are the numbers up to the order of sums. None equals None."""
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        if b is None:
            assert a is None, number
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (number, a.shape, b.shape, a.dtype, b.dtype)
        if not torch.equal(a, b):  # equal infinities have no difference
            scale = max(float(b.double().abs().max()), 1e-30)
            torch.testing.assert_close(a.double() / scale, b.double() / scale, rtol=0.0, atol=tolerance)
