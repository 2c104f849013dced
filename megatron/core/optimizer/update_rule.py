"""AdamW and SGD over flat tensors, in one pass: of torch's fused kernels on CUDA, and of kernels/ops/adam.py on the CPU.

Loss unscaling and clipping need no further pass: both are part of one divisor of the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.kernels.ops.adam import adamw_step


class Run(NamedTuple):
    """The elements from start to stop, which have the same learning rate and weight decay.

    decay: weight decay applies. decoupled: they are of the word embeddings or of the output layer.
    """

    start: int
    stop: int
    decay: bool
    decoupled: bool


@dataclass(frozen=True)
class Inputs:
    """The scalars of one step. step: 1 for the first update. divisor: the gradients are divided by it.

    decoupled_lr: the learning rate of the word embeddings and of the output layer; lr is that of all others.
    """

    step: int
    lr: float
    decoupled_lr: float
    weight_decay: float
    divisor: float

    def rates(self, run: Run) -> tuple[float, float]:
        """Returns (learning rate, weight decay) of a run."""
        return self.decoupled_lr if run.decoupled else self.lr, self.weight_decay if run.decay else 0.0


def update(
    config: OptimizerConfig,
    runs: Sequence[Run],
    values: Mapping[str, Tensor],
    gradient: Tensor,
    out: Tensor | None,
    inputs: Inputs,
) -> None:
    """Updates `values` ("master" and moments, flat and in fp32) in place with a gradient; all are on the same device.

    out: receives the masters, rounded to its dtype, if it is given. On CUDA the gradient is undefined afterwards.
    """
    if config.rule == "sgd":
        _sgd(config, runs, values, gradient, inputs)
    elif gradient.is_cuda:
        _adamw_on_cuda(config, runs, values, gradient, inputs)
    else:
        for run in runs:
            lr, weight_decay = inputs.rates(run)
            elements = slice(run.start, run.stop)
            adamw_step(
                values["master"][elements],
                gradient[elements],
                values["exp_avg"][elements],
                values["exp_avg_sq"][elements],
                step=inputs.step,
                lr=lr,
                beta1=config.adam_beta1,
                beta2=config.adam_beta2,
                eps=config.adam_eps,
                weight_decay=weight_decay,
                divisor=inputs.divisor,
                out=None if out is None else out[elements],
            )
        return
    if out is not None:
        out.copy_(values["master"])


def _adamw_on_cuda(
    config: OptimizerConfig, runs: Sequence[Run], values: Mapping[str, Tensor], gradient: Tensor, inputs: Inputs
) -> None:
    step = torch.full((), float(inputs.step), device=gradient.device)
    divisor = _on_device(inputs.divisor, gradient)
    for (lr, weight_decay), chosen in _by_rates(runs, inputs).items():
        torch._fused_adamw_(
            [values["master"][elements] for elements in chosen],
            [gradient[elements] for elements in chosen],
            [values["exp_avg"][elements] for elements in chosen],
            [values["exp_avg_sq"][elements] for elements in chosen],
            [],
            [step] * len(chosen),
            lr=lr,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            weight_decay=weight_decay,
            eps=config.adam_eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,  # the kernel divides by it: torch's own GradScaler hands it over the same way
            found_inf=None,
        )


def _sgd(
    config: OptimizerConfig, runs: Sequence[Run], values: Mapping[str, Tensor], gradient: Tensor, inputs: Inputs
) -> None:
    for (lr, weight_decay), chosen in _by_rates(runs, inputs).items():
        momenta = [values["momentum_buffer"][elements] for elements in chosen]
        torch._fused_sgd_(
            [values["master"][elements] for elements in chosen],
            [gradient[elements] for elements in chosen],
            momenta if config.sgd_momentum != 0.0 else [],
            weight_decay=weight_decay,
            momentum=config.sgd_momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,  # buffers begin at zero
            grad_scale=_on_device(inputs.divisor, gradient),
            found_inf=None,
        )


def _by_rates(runs: Sequence[Run], inputs: Inputs) -> dict[tuple[float, float], list[slice]]:
    """Groups the runs by learning rate and weight decay: a kernel takes many tensors but one value of each."""
    found: dict[tuple[float, float], list[slice]] = {}
    for run in runs:
        found.setdefault(inputs.rates(run), []).append(slice(run.start, run.stop))
    return found


def _on_device(divisor: float, like: Tensor) -> Tensor | None:
    return None if divisor == 1.0 else torch.full((), divisor, device=like.device)
