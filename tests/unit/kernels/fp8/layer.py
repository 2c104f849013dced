"""The three products of one layer in FP8, in fp64, and how far they may be apart."""

import torch

from megatron.kernels.ops.fp8 import operands
from megatron.kernels.ops.fp8.formats import E4M3, FORMATS
from megatron.kernels.ops.fp8.linear import Fp8Linear
from megatron.kernels.ops.fp8.quantize import amax_of, dequantize, scale_of
from tests.unit.kernels.close import random

RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")


def make_operands(recipe, formats, *tensors):
    """The operands of a layer. delayed: scales that fit `tensors` (input, weight, gradient), as of an earlier step."""
    if recipe != "delayed":
        return getattr(operands, recipe)(FORMATS[formats])
    dtypes = operands._dtypes(FORMATS[formats])
    scales = tuple(scale_of(amax_of(x), torch.finfo(of).max) for x, of in zip(tensors, dtypes, strict=True))
    return operands.delayed(FORMATS[formats], scales, tuple(torch.zeros(1, device=each.device) for each in scales))


def draw(n, out, into, dtype=torch.bfloat16, outliers=False):
    """input [n, in], weight [out, in], gradient [n, out]. Outliers: a channel, a token and single elements that are 200
    to 3000 times as large as others, as in trained models.
    """
    x, weight, grad = random(n, into), random(out, into, seed=1, scale=0.02), random(n, out, seed=2, scale=1e-4)
    if outliers:
        x[:, into // 3] *= 200.0
        grad[n // 2] *= 1000.0
        for each in (x, weight, grad):
            each.view(-1)[:: each.numel() // 3] *= 3000.0
    return x.to(dtype), weight.to(dtype), grad.to(dtype)


def products(kernel, x, weight, grad):
    """[output, gradient of the input, gradient of the weight]."""
    prepared = kernel.prepare(grad, for_weight=True)
    main_grad = torch.full(weight.shape, float("nan"), device=x.device)
    kernel.weight_grad(main_grad, prepared, x, True)
    return [kernel.output(x, weight), kernel.input_grad(prepared, weight), main_grad]


def make_kernel(recipe, formats, tensors, product, **options):
    """The products of a layer with this input, weight and gradient."""
    return Fp8Linear(make_operands(recipe, formats, *tensors), product, keep_weight=True, **options)


def pairs(x, weight, grad, of):
    """The three products as (a [m, k], b [n, k], quantize a, quantize b) of a @ b.t()."""
    return [
        (x, weight, *_rows(of.input, of.weight)),
        (grad, weight.t(), _rows(of.gradient)[0], lambda _: of.weight(weight, rows=False, columns=True).columns),
        (
            grad.t(),
            x.t(),
            lambda _: of.gradient(grad, rows=False, columns=True).columns,
            lambda _: of.input(x, rows=False, columns=True).columns,
        ),
    ]


def _rows(*each):
    return [lambda x, one=one: one(x, rows=True, columns=False).rows for one in each]


def exact(x, weight, grad):
    """The three products in fp64."""
    x, weight, grad = (each.double() for each in (x, weight, grad))
    return [x @ weight.t(), grad @ weight, grad.t() @ x]


def step(q):
    """Largest relative error of a normal number of the format (half a step), and the largest error of a smaller one."""
    return (2.0**-4, 2.0**-10) if q.data.dtype == E4M3 else (2.0**-3, 2.0**-17)


def bounds(x, weight, grad, of):
    """For each element of the three products: how far quantization can take it from the exact product.

    An element a is at most e_a = max(u |a|, s) from its quantized value: half a step of the format, or of its smallest
    numbers, which is s times the factor of the block. (MXFP8 also clamps elements to 448 / 512 of a power of two.) So a
    product is at most sum(e_a |b| + |a| e_b + e_a e_b) away.
    """
    found = []
    for a, b, quantize_a, quantize_b in pairs(x, weight, grad, of):
        of_a, of_b = _errors(a.double(), quantize_a(a)), _errors(b.double(), quantize_b(b))
        a, b = a.double().abs(), b.double().abs()
        found.append(of_a @ b.t() + a @ of_b.t() + of_a @ of_b.t())
    return found


def _errors(x, q):
    relative, absolute = step(q)
    ones = q._replace(data=torch.ones_like(q.data, dtype=torch.float32).to(q.data.dtype))
    error = torch.maximum(x.abs() * relative, absolute * dequantize(ones).double())
    return torch.maximum(error, x.abs() * 0.125) if q.inverse.dtype == torch.float8_e8m0fnu else error


def relative(found, expected):
    """The error of all elements together."""
    return float((found.double() - expected).norm() / expected.norm())
