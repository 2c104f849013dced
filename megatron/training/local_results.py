"""The numbers of a step that each rank keeps of its own computation, before they disappear in a sum.

[Note: local results]
In a sum over hundreds of ranks one wrong number, or one strange sample, hardly shows. So a rank keeps three numbers:
    loss                    the mean over the unmasked tokens of its samples; 0 where it has no last stage
    gradient norm           the 2-norm of its gradients before their reduction; of each backward where each is reduced
    reduced gradient norm   the 2-norm of the sums that it holds after the reduction
None of them needs the host. An all-gather gives all ranks the table of all numbers, from which they draw the same
conclusions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.comm.collectives import all_gather
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import Group
from megatron.kernels.ops.square_sum import SquareSum
from megatron.training.step import Objective

RESULTS = ("loss", "gradient norm", "reduced gradient norm")
LOSS, LOCAL_NORM, REDUCED_NORM = range(len(RESULTS))


class LocalResults:
    """The local results of the ranks of a run.

    Per forward and backward: a sum of squares over the gradients that this rank reduces and one over those that it
    holds afterwards, and a few operations on single numbers.
    """

    def __init__(self, data_parallel: DataParallel, world: Group, squares: SquareSum) -> None:
        self._data_parallel, self._world, self._square_sum = data_parallel, world, squares
        self._squares: list[Tensor] = []  # of the gradients that were reduced since the last table
        data_parallel.before_reduce = self._add

    def table(self, objective: Objective, scale: Tensor, *, infinite: bool = False) -> Tensor:
        """Returns the results of all ranks, fp64 [world, 3], of the forward and backward that has just ended.

        scale: of the loss. infinite: the loss of this rank counts as infinite. Communication: one all-gather of 24 bytes
        per rank over the world.
        """
        total, tokens = objective.local
        none = torch.zeros((), dtype=torch.float64, device=total.device)  # a rank may train nothing
        reduced = [self._square_sum(bucket.grad_shard) for bucket in self._data_parallel.buckets]
        squares, self._squares = self._squares, []
        local = torch.stack([torch.stack([none, *part]).sum() for part in (squares, reduced)]).sqrt() / scale
        results = torch.cat([(total / tokens.clamp(min=1)).abs().view(1), local])
        if infinite:
            results[LOSS] = torch.inf
        return all_gather(results.unsqueeze(0), self._world)

    def _add(self, gradients: Tensor) -> None:
        self._squares.append(self._square_sum(gradients))


def largest_of(table: Tensor) -> Tensor:
    """Returns the largest number of each result, NaN before all others, and its rank: fp64 [2, 3]."""
    values, ranks = table.max(dim=0)
    return torch.stack([values, ranks.double()])
