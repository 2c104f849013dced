"""Weight gradients of a rank's experts, in the fp32 memory that they belong to.

E experts with matrices [out, in]; A assignments of a row to an expert, sorted by expert (assignments.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from megatron.kernels.ops.assignments import Assignments, Picked, gather
from megatron.kernels.ops.weight_grad import WeightGrad

# (main_grad [E, out, in], gradients of the outputs [A, out], inputs [A, in], their assignments, overwrite instead of
# add). All of main_grad is written if `overwrite`: zeros for experts without rows.
ExpertWeightGrad = Callable[[Tensor, Picked, Picked, Assignments, bool], None]


def one_by_one(kernel: WeightGrad) -> ExpertWeightGrad:
    """The reference: one product per expert that has rows, by `kernel`.

    It adds in fp32, which torch's grouped product does not, and writes all elements for any number of rows.
    """
    return functools.partial(_write, kernel)


def _write(
    kernel: WeightGrad, main_grad: Tensor, grads: Picked, values: Picked, assignments: Assignments, overwrite: bool
) -> None:
    sizes = list(assignments.sizes)
    pieces = zip(
        sizes,
        grads.gathered(gather).split(sizes),
        values.gathered(gather).split(sizes),
        main_grad.unbind(),
        strict=True,
    )
    for size, grad, value, of_expert in pieces:
        if size:
            kernel(of_expert, grad, value, overwrite)
        elif overwrite:
            of_expert.zero_()
