"""The MLPs of a rank's experts: forward and backward without autograd, which core/transformer/moe/experts.py adds.

M rows; A assignments of a row to an expert; E experts of this rank, of width f (local: f/etp). The output of a row is the
sum over its assignments of  fc2_e (weight * activation(fc1_e row)).  The weight stands before fc2, so its gradient needs no
output of fc2, and a region that is recomputed need not run fc2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.ops.activation import Activation
from megatron.kernels.ops.assignments import Assignments, RowOrder, row_order
from megatron.kernels.ops.expert_weight_grad import ExpertWeightGrad, Picked
from megatron.kernels.ops.grouped_gemm import GroupedGemm, gather_product, product_sum

# Takes a function of (main_grad, overwrite) that writes or adds a gradient, and calls it now or later.
Deliver = Callable[[Callable[[Tensor, bool], None]], None]


@dataclass(frozen=True)
class ExpertKernels:
    """How the experts of a layer compute."""

    gemm: GroupedGemm
    weight_grad: ExpertWeightGrad
    activation: Activation


class SavedExperts(NamedTuple):
    """What backward needs of forward.

    rows [M, h]; None if fc1 is frozen. order [A], starts [M]: of RowOrder. weights [A] fp32. inner: the output of fc1,
    [A, 2 f], or [A, f] without a gate. activated: [A, f], or None: then backward computes it again, with the same bits.
    """

    rows: Tensor | None
    order: Tensor
    starts: Tensor
    weights: Tensor
    inner: Tensor
    activated: Tensor | None


def forward(
    rows: Tensor,
    weights: Tensor,
    assignments: Assignments,
    fc1: Tensor,
    fc2: Tensor,
    kernels: ExpertKernels,
    *,
    keep_activation: bool,
    skip_fc2: bool,
) -> tuple[Tensor, SavedExperts]:
    """rows [M, h], weights [A] fp32, fc1 [E, 2, f, h] (or [E, f, h] without a gate), fc2 [E, h, f] -> output [M, h].

    skip_fc2: the output is undefined, and what is saved is the same. For the second run of a recomputed region.
    """
    inner = gather_product(kernels.gemm, rows, assignments, fc1.flatten(1, -2).transpose(1, 2))
    activated = kernels.activation(inner) if keep_activation or not skip_fc2 else None
    by_row = row_order(assignments, len(rows))
    saved = SavedExperts(rows, *by_row, weights, inner, activated if keep_activation else None)
    if skip_fc2:
        return torch.empty_like(rows), saved
    assert activated is not None
    weighted = _weighted(activated, weights, in_place=not keep_activation)
    return product_sum(kernels.gemm, weighted, assignments, fc2.transpose(1, 2), by_row), saved


def backward(
    grad: Tensor,
    saved: SavedExperts,
    assignments: Assignments,
    fc1: Tensor,
    fc2: Tensor,
    kernels: ExpertKernels,
    *,
    deliver_fc1: Deliver | None,
    deliver_fc2: Deliver | None,
    wants_rows: bool,
) -> tuple[Tensor | None, Tensor]:
    """grad [M, h] of the output -> gradients of the rows [M, h] (None unless wanted) and of the weights [A] fp32.

    deliver_fc1, deliver_fc2: where the gradients of fc1 and fc2 go; None if they are frozen. A function that is called
    later keeps the tensors that it needs.
    """
    gemm, activation = kernels.gemm, kernels.activation
    grad_activated = gather_product(gemm, grad, assignments, fc2)  # of the weighted activation, at first
    activated = activation(saved.inner) if saved.activated is None else saved.activated
    grad_weights = (grad_activated * activated.to(saved.weights.dtype)).sum(dim=-1)
    if deliver_fc2 is not None:
        weighted = _weighted(activated, saved.weights, in_place=saved.activated is None)
        picked = Picked(grad, assignments.rows)
        deliver_fc2(functools.partial(_write, picked, Picked(weighted, None), assignments, kernels.weight_grad))
        del weighted
    del activated
    if deliver_fc1 is None and not wants_rows:
        return None, grad_weights
    _weighted(grad_activated, saved.weights, in_place=True)
    grad_inner = activation.gradient_of_input(grad_activated, saved.inner)
    del grad_activated
    if deliver_fc1 is not None:
        assert saved.rows is not None
        picked = Picked(saved.rows, assignments.rows)
        deliver_fc1(functools.partial(_write, Picked(grad_inner, None), picked, assignments, kernels.weight_grad))
    if not wants_rows:
        return None, grad_weights
    by_row = RowOrder(saved.order, saved.starts)
    return product_sum(gemm, grad_inner, assignments, fc1.flatten(1, -2), by_row), grad_weights


def _write(
    grads: Picked,
    values: Picked,
    assignments: Assignments,
    kernel: ExpertWeightGrad,
    main_grad: Tensor,
    overwrite: bool,
) -> None:
    kernel(main_grad.flatten(1, -2), grads, values, assignments, overwrite)


def _weighted(values: Tensor, weights: Tensor, *, in_place: bool) -> Tensor:
    """values [A, f] times weights [A], rounded once."""
    out = values if in_place else torch.empty_like(values)
    return torch.mul(values, weights.unsqueeze(-1), out=out)
