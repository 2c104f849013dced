"""Random experts, and what they compute: row by row, expert by expert, with plain torch."""

import torch

from megatron.kernels.ops.assignments import Assignments
from tests.unit.kernels.close import random


def assign(chosen, experts):
    """Assignments of rows to experts, from each row's list of experts."""
    pairs = sorted((expert, row) for row, of_row in enumerate(chosen) for expert in of_row)
    sizes = [sum(expert == e for expert, _ in pairs) for e in range(experts)]
    ends = torch.tensor(sizes).cumsum(0).int()
    return Assignments(torch.tensor([row for _, row in pairs], dtype=torch.int64), ends, sizes)


def choices(case, rows, experts):
    """Each row's experts, by the name of a distribution."""
    generator = torch.Generator().manual_seed(rows + experts)
    if case == "uniform":
        return [torch.randperm(experts, generator=generator)[:2].tolist() for _ in range(rows)]
    if case == "skew":  # nearly all rows to one expert, and an expert with one row
        return [[1] if row else [1, experts - 1] for row in range(rows)]
    if case == "all":  # k = E
        return [list(range(experts)) for _ in range(rows)]
    if case == "ragged":  # 0 to 3 experts per row; the first and the last expert have none
        return [list(range(1, experts - 1))[: row % 4] for row in range(rows)]
    assert case == "none"
    return [[] for _ in range(rows)]


def stacks(experts, hidden, width, *, gated, dtype=torch.float32):
    """(fc1, fc2) of all experts."""
    shape = (experts, 2, width, hidden) if gated else (experts, width, hidden)
    return random(*shape, dtype=dtype, seed=11, scale=0.3), random(
        experts, hidden, width, dtype=dtype, seed=12, scale=0.3
    )


def dense(rows, weights, fc1, fc2, assignments, activation, biases=None):
    """The definition, differentiable. activation: of torch, not of the framework. biases: of fc1 and fc2."""
    total, at = [row * 0 for row in rows], 0
    for expert, size in enumerate(assignments.sizes):
        for row in assignments.rows[at : at + size].tolist():
            inner = fc1[expert] @ rows[row]
            if biases is not None:
                inner = inner + biases[0][expert]
                total[row] = total[row] + weights[at] * biases[1][expert]
            total[row] = total[row] + fc2[expert] @ (weights[at] * activation(inner))
            at += 1
    return torch.stack(total)
