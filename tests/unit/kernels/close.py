"""Kernels against plain torch in fp64, through autograd."""

import torch


def random(*shape, dtype=torch.float32, seed=0, scale=1.0):
    """Normal numbers, the same for the same arguments."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def outputs_and_gradients(function, inputs, upstream):
    """[output, gradient of each input] of `function(*inputs)` for the gradient `upstream` of its output."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def assert_same(kernel, reference, inputs, *, rtol=1e-5, atol=1e-6):
    """Output and every gradient of `kernel` equal those of `reference` in fp64, relative to the largest element of
    each."""
    shape = reference(*inputs).shape
    upstream = random(*shape, seed=99)
    found = outputs_and_gradients(kernel, inputs, upstream)
    expected = outputs_and_gradients(reference, [x.double() for x in inputs], upstream)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == (inputs[number - 1].dtype if number else a.dtype)
        scale = float(b.abs().max()) or 1.0
        torch.testing.assert_close(a.double() / scale, b / scale, rtol=rtol, atol=atol, msg=lambda m: f"{number}: {m}")  # noqa: B023
