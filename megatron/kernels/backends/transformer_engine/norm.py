"""Transformer Engine's RMSNorm and LayerNorm, with the interface of ops/norm.py.

They compute in fp32 and round once, after the multiplication by the weight, where the reference rounds twice. They take
rows of one dtype with the weight: a residual stream in fp32, norms of sharded channels and LayerNorms without a bias
are for the reference.
"""

from __future__ import annotations

from torch import Tensor
from transformer_engine.pytorch import cpp_extensions as engine
from transformer_engine.pytorch.constants import TE_DType

from megatron.kernels.ops import norm as reference
from megatron.kernels.ops.norm import Average, own

_SM_MARGIN = 0  # multiprocessors that are left to other kernels
_ZERO_CENTERED = False  # weights are given as they multiply


def compute_rms_norm(x: Tensor, weight: Tensor, epsilon: float, average: Average = own) -> tuple[Tensor, Tensor]:
    """Computes RMSNorm over the last dim: (output, reciprocal root mean square). See NormKernel."""
    if average is not own or not _takes(x, weight):
        return reference.compute_rms_norm(x, weight, epsilon, average)
    out, _, rstd = engine.rmsnorm_fwd(
        _rows(x, weight), weight.flatten(), epsilon, None, None, TE_DType[weight.dtype], _SM_MARGIN, _ZERO_CENTERED
    )
    return out.view(x.shape), _per_row(rstd, x, weight)


def gradient_rms_norm(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, average: Average = own
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of RMSNorm with respect to x and the weight. See NormKernel."""
    if average is not own or not _takes(x, weight):
        return reference.gradient_rms_norm(grad, x, weight, rstd, average)
    grad_x, grad_weight = engine.rmsnorm_bwd(
        _rows(grad.to(x.dtype), weight), _rows(x, weight), rstd.flatten(), weight.flatten(), _SM_MARGIN, _ZERO_CENTERED
    )
    return grad_x.view(x.shape), grad_weight.view(weight.shape)


def compute_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Computes LayerNorm over the last dim: (output, (mean, reciprocal deviation)). See NormKernel."""
    if bias is None or not _takes(x, weight):
        return reference.compute_layer_norm(x, weight, bias, epsilon)
    out, mean, rstd = engine.layernorm_fwd(
        _rows(x, weight), weight, bias, epsilon, None, None, TE_DType[weight.dtype], _SM_MARGIN, _ZERO_CENTERED
    )
    return out.view(x.shape), (_per_row(mean, x, weight), _per_row(rstd, x, weight))


def gradient_layer_norm(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, statistics: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of LayerNorm with respect to x, the weight and the bias. See NormKernel."""
    if bias is None or not _takes(x, weight):
        return reference.gradient_layer_norm(grad, x, weight, bias, statistics)
    mean, rstd = (tensor.flatten() for tensor in statistics)
    grad_x, grad_weight, grad_bias = engine.layernorm_bwd(
        _rows(grad.to(x.dtype), weight), _rows(x, weight), mean, rstd, weight, _SM_MARGIN, _ZERO_CENTERED
    )
    return grad_x.view(x.shape), grad_weight, grad_bias


def compute_add_norm(
    x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Adds a branch to the residual stream with torch, and computes the norm of the sum. See ResidualNorm."""
    total = x + branch
    if bias is None:
        out, rstd = compute_rms_norm(total, weight, epsilon)
        return total, out, (rstd, rstd)
    return total, *compute_layer_norm(total, weight, bias, epsilon)


def gradient_add_norm(
    grad: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of `compute_add_norm`. The kernel of RMSNorm adds the gradient of the sum. See
    ResidualNorm."""
    if bias is None and grad_total is not None and _takes(total, weight):
        grad_x, grad_weight = engine.rmsnorm_bwd_add(
            _rows(grad.to(total.dtype), weight),
            _rows(total, weight),
            _rows(grad_total.to(total.dtype), weight),
            statistics[1].flatten(),
            weight.flatten(),
            _SM_MARGIN,
            _ZERO_CENTERED,
        )
        return grad_x.view(total.shape), grad_weight.view(weight.shape), None
    grad_bias = None
    if bias is None:
        grad_x, grad_weight = gradient_rms_norm(grad, total, weight, statistics[1])
    else:
        grad_x, grad_weight, grad_bias = gradient_layer_norm(grad, total, weight, bias, statistics)
    return grad_x if grad_total is None else grad_x + grad_total, grad_weight, grad_bias


def _takes(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype and x.numel() > 0


def _rows(x: Tensor, weight: Tensor) -> Tensor:
    """The rows that are normalized, one behind the other: the kernels ignore strides."""
    return x.reshape(-1, weight.numel()).contiguous()


def _per_row(numbers: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return numbers.view(x.shape[: x.dim() - weight.dim()] + (1,) * weight.dim())
