"""Rounds sums of gradients to bf16 at random (kernels/ops/random_rounding.py), each with bits of its own.

The bits are a hash of (step, number of the sum within the step, copy of the model, parameter, global index). So a
resumed run draws the same ones. Data-parallel copies draw different ones, because the errors of equal ones would add
up, and tp ranks that hold the same gradient draw equal ones, so that it stays the same.
"""

from __future__ import annotations

import functools
from collections import Counter

from torch import Tensor

from megatron.core.parameter import ParamInfo
from megatron.kernels.ops.random_rounding import round_in_blocks, section_bits


class GradRounding:
    """Counts the sums of a step. copy: the number of this rank among those that hold the same parameters."""

    def __init__(self, copy: int) -> None:
        self._copy, self._iteration = copy, 0
        self._sums: Counter[str] = Counter()

    def begin_step(self, iteration: int) -> None:
        """Call at the beginning of a step, with its number in the run."""
        self._iteration = iteration
        self._sums.clear()

    def key(self, label: str) -> str:
        """Returns the key of the next sum of this label: a parameter, or a bucket whose slices are summed over all
        copies."""
        self._sums[label] += 1
        return f"gradient/{self._iteration}/{self._sums[label]}"

    def round(self, name: str, info: ParamInfo, total: Tensor, out: Tensor) -> None:
        """Rounds the fp32 gradient of a whole local parameter into its memory in bf16."""
        key = f"{self.key(name)}/{self._copy}/{name}"
        values, memory = total.view(-1), out.view(-1)
        for section in info.sections:
            place = slice(section.start, section.start + section.numel)
            bits = functools.partial(section_bits, key, info.spec.shape, section, out.device)
            round_in_blocks(values[place], memory[place], bits)
