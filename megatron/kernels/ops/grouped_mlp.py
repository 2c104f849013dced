"""The MLPs of a rank's experts: forward and backward without autograd, which core/transformer/moe/experts.py adds.

M rows; A assignments of a row to an expert; E experts of this rank, of width f (local: f/etp). The output of a row is
the sum over its assignments of  fc2_e (weight * activation(fc1_e row)),  or with biases of
fc2_e (weight * activation(fc1_e row + b1_e)) + weight * b2_e.  The weight stands before fc2, so its gradient needs no
output of fc2, and a region that is recomputed need not run fc2. A row may have any number of experts, so operands with
M rows are gathered for a while, and results for the same row are added up in one order: two runs have the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.ops.assignments import Assignments, Picked, RowKernels, RowOrder, row_order
from megatron.kernels.ops.batch_invariant import expert_tree
from megatron.kernels.ops.expert_weight_grad import ExpertWeightGrad
from megatron.kernels.ops.grouped_linear import GroupedLinear
from megatron.kernels.ops.weighted_activation import WeightedActivation


class ExpertBiases(NamedTuple):
    """fc1 [E, 2, f] or [E, f]; fc2 [E, c], for channels `first` to `first + c - 1` of the output."""

    fc1: Tensor
    fc2: Tensor
    first: int


# Takes a bias's gradient in fp32, [E, n].
DeliverBias = Callable[[Tensor], None]
# Takes a function of (main_grad, overwrite) that writes or adds a gradient, and calls it now or later.
Deliver = Callable[[Callable[[Tensor, bool], None]], None]


@dataclass(frozen=True)
class ExpertKernels:
    """How the experts of a layer compute."""

    fc1: GroupedLinear
    fc2: GroupedLinear
    weight_grad: ExpertWeightGrad
    activation: WeightedActivation
    rows: RowKernels


class SavedExperts(NamedTuple):
    """What backward needs of forward.

    rows [M, h]; None if fc1 is frozen. order [A], starts [M]: of RowOrder. weights [A] fp32. inner: the output of fc1,
    [A, 2 f], or [A, f] without a gate. activated: [A, f], as WeightedActivation keeps it, or None: then backward
    computes it again, with the same bits.
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
    biases: ExpertBiases | None = None,
    keep_activation: bool,
    skip_fc2: bool,
) -> tuple[Tensor, SavedExperts]:
    """rows [M, h], weights [A] fp32, fc1 [E, 2, f, h] (or [E, f, h] without a gate), fc2 [E, h, f] -> output [M, h].

    skip_fc2: the output is undefined, and what is saved is the same. For the second run of a recomputed region.
    """
    inner = kernels.fc1.output(Picked(rows, assignments.rows), fc1.flatten(1, -2), assignments)
    experts = None if biases is None else _experts(assignments)
    if biases is not None and experts is not None:
        inner += biases.fc1.flatten(1).index_select(0, experts)
    activated = kernels.activation.keep(inner) if keep_activation else None
    by_row = row_order(assignments, len(rows))
    saved = SavedExperts(rows, *by_row, weights, inner, activated)
    if skip_fc2:
        return torch.empty_like(rows), saved
    weighted = kernels.activation.product(inner, activated, weights)
    products = kernels.fc2.output(Picked(weighted, None), fc2, assignments)
    if biases is not None and experts is not None:
        rows_of_biases = biases.fc2.index_select(0, experts)
        channels = products.narrow(1, biases.first, biases.fc2.shape[1])
        channels += (weights.unsqueeze(1) * rows_of_biases).to(products.dtype)
    if kernels.rows.in_tree:
        return expert_tree.add_up(products, by_row, assignments.ends), saved
    return kernels.rows.add_up(products, by_row), saved


def backward(
    grad: Tensor,
    saved: SavedExperts,
    assignments: Assignments,
    fc1: Tensor,
    fc2: Tensor,
    kernels: ExpertKernels,
    *,
    biases: ExpertBiases | None = None,
    deliver_fc1: Deliver | None,
    deliver_fc2: Deliver | None,
    deliver_biases: tuple[DeliverBias | None, DeliverBias | None] = (None, None),
    wants_rows: bool,
) -> tuple[Tensor | None, Tensor]:
    """grad [M, h] of the output -> gradients of the rows [M, h] (None unless wanted) and of the weights [A] fp32.

    deliver_fc1, deliver_fc2: where the gradients of fc1 and fc2 go; None if they are frozen. A function that is called
    later keeps the tensors that it needs. deliver_biases: takes the gradients of the biases of fc1 and fc2, and is
    called at once.
    """
    deliver_b1, deliver_b2 = deliver_biases
    write = functools.partial(_write, assignments, kernels.weight_grad)

    def deliver_weighted(weighted: Tensor) -> None:
        assert deliver_fc2 is not None
        deliver_fc2(functools.partial(write, Picked(grad, assignments.rows), Picked(weighted, None)))

    grad_inner, grad_weights = kernels.activation.gradient(
        kernels.fc2.input_grad(Picked(grad, assignments.rows), fc2, assignments),
        saved.inner,
        saved.activated,
        saved.weights,
        take=None if deliver_fc2 is None else deliver_weighted,
        wants_inner=wants_rows or deliver_fc1 is not None or deliver_b1 is not None,
    )
    if biases is not None:
        channels = grad.narrow(1, biases.first, biases.fc2.shape[1])
        grad_products = kernels.rows.gather(channels.contiguous(), assignments.rows).float()
        grad_weights += (grad_products * biases.fc2.index_select(0, _experts(assignments))).sum(dim=1)
        if deliver_b2 is not None:
            deliver_b2(_sums(assignments, grad_products.mul_(saved.weights.unsqueeze(1))))
    if grad_inner is not None and deliver_b1 is not None:
        deliver_b1(_sums(assignments, grad_inner))
    if grad_inner is not None and deliver_fc1 is not None:
        assert saved.rows is not None
        deliver_fc1(functools.partial(write, Picked(grad_inner, None), Picked(saved.rows, assignments.rows)))
    if grad_inner is None or not wants_rows:
        return None, grad_weights
    by_row = RowOrder(saved.order, saved.starts)
    products = kernels.fc1.input_grad(Picked(grad_inner, None), fc1.flatten(1, -2), assignments)
    return kernels.rows.add_up(products, by_row), grad_weights


def _experts(assignments: Assignments) -> Tensor:
    """The expert of each assignment, [A] int64."""
    numbers = torch.arange(len(assignments.rows), dtype=torch.int32, device=assignments.ends.device)
    return torch.searchsorted(assignments.ends, numbers, right=True)


def _sums(assignments: Assignments, values: Tensor) -> Tensor:
    """values [A, n] -> their sums in fp32 over the assignments of each expert, in order, [E, n]."""
    offsets = F.pad(assignments.ends.long(), (1, 0))
    return torch.segment_reduce(values.float(), "sum", offsets=offsets, axis=0, initial=0.0)


def _write(
    assignments: Assignments,
    kernel: ExpertWeightGrad,
    grads: Picked,
    values: Picked,
    main_grad: Tensor,
    overwrite: bool,
) -> None:
    kernel(main_grad.flatten(1, -2), grads, values, assignments, overwrite)
