"""The update of flat tensors by an optimizer's rule. The rules are in core/optimizer/rules.

Loss unscaling and clipping need no further pass: both are part of one divisor of the gradients. The device that updates
decides itself whether it does: the host does not wait for the gradient's norm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.kernels.ops.adam import DeviceAdamW
from megatron.kernels.ops.update_run import UpdateRun


def gate_of(divisor: Tensor, found_inf: Tensor) -> Tensor:
    """Returns fp32 [3]: the divisor of the gradients; 1 or 0, 1 if a kernel must not use them as they are; the same, if
    a kernel must not divide them. Both are 1, and nothing changes, if a gradient is not finite.

    divisor: fp64 []. found_inf: bool []. No kernel divides by 1: torch's write the divided gradient back to memory.
    """
    is_one = divisor.float() == 1.0
    return torch.stack([divisor, (found_inf | ~is_one).double(), (found_inf | is_one).double()]).float()


@dataclass(frozen=True)
class Inputs:
    """The scalars of one step. step: 1 for the first update.

    decoupled_lr: the learning rate of the word embeddings and of the output layer, whose runs are decoupled; lr is that
    of all others. gate: fp32 [3], where the update takes place; see `gate_of`.
    """

    step: int
    lr: float
    decoupled_lr: float
    weight_decay: float
    gate: Tensor

    def rates(self, run: UpdateRun) -> tuple[float, float]:
        """Returns (learning rate, weight decay) of a run."""
        return self.decoupled_lr if run.decoupled else self.lr, self.weight_decay if run.decay else 0.0


class UpdateRule(ABC):
    """One optimizer's update of the elements of `runs`.

    config: the coefficients of the rule. one_pass: a kernel of the device that updates these runs in one pass, for a
    rule that has one.
    """

    def __init__(self, config: OptimizerConfig, runs: Sequence[UpdateRun], one_pass: DeviceAdamW | None = None) -> None:
        self.config, self.runs, self.one_pass = config, runs, one_pass

    def step(self, values: Mapping[str, Tensor], gradient: Tensor, out: Tensor | None, inputs: Inputs) -> None:
        """Updates `values` ("master" and the rule's state, flat and in fp32) in place; all are on one device.

        out: receives the masters, rounded to its dtype, if it is given. On CUDA the gradient is undefined afterwards.
        """
        divisor, not_plain, not_divided = inputs.gate.unbind()
        if gradient.is_cuda:
            self.apply_gated(values, gradient, inputs)
        elif not (not_plain.numpy() and not_divided.numpy()):  # of host memory: there is nothing to wait for
            self.apply(values, gradient, inputs, divisor if not_plain.numpy() else None, None)
        if out is not None:
            out.copy_(values["master"])

    def apply_gated(self, values: Mapping[str, Tensor], gradient: Tensor, inputs: Inputs) -> None:
        """Updates `values` without the host knowing the gate: both kernels are queued, and at most one of them does
        anything."""
        divisor, not_plain, not_divided = inputs.gate.unbind()
        self.apply(values, gradient, inputs, None, not_plain)
        self.apply(values, gradient, inputs, divisor, not_divided)

    def step_on_cpu(self, values: Mapping[str, Tensor], gradient: Tensor, out: Tensor | None, inputs: Inputs) -> None:
        """Does as `step` for tensors that are kept in host memory, for a rule whose RuleSpec says so."""
        self.step(values, gradient, out, inputs)

    @abstractmethod
    def apply(
        self,
        values: Mapping[str, Tensor],
        gradient: Tensor,
        inputs: Inputs,
        divisor: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Updates `values` by the gradient over `divisor` (fp32 []; None: as it is), unless `found_inf` (fp32 []) is
        1."""

    def runs_by_rates(self, inputs: Inputs) -> dict[tuple[float, float], list[slice]]:
        """Returns the elements of each (learning rate, weight decay): a kernel takes many tensors but one value of
        each."""
        elements: dict[tuple[float, float], list[slice]] = {}
        for run in self.runs:
            elements.setdefault(inputs.rates(run), []).append(slice(run.start, run.stop))
        return elements
