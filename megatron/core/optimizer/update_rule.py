"""AdamW and SGD over a flat run of elements: one pass of torch's fused kernels on CUDA, of kernels/ops/adam.py on the CPU.

Loss unscaling and clipping are one divisor inside that pass, not passes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.kernels.ops.adam import adamw_step

Run = tuple[int, int, bool]  # start, stop, whether weight decay applies


@dataclass(frozen=True)
class Inputs:
    """What one step needs beside tensors. step: 1 for the first update. divisor: of the gradients."""

    step: int
    lr: float
    weight_decay: float
    divisor: float


def update(
    config: OptimizerConfig,
    runs: Sequence[Run],
    values: Mapping[str, Tensor],
    gradient: Tensor,
    out: Tensor | None,
    inputs: Inputs,
) -> None:
    """Step `values`, flat and fp32 ("master" and moments), with a gradient; all on one device, in place.

    out: also gets the masters, rounded to its dtype. On CUDA the gradient is undefined afterwards.
    """
    if config.rule == "sgd":
        _sgd(config, runs, values, gradient, inputs)
    elif gradient.is_cuda:
        _adamw_on_cuda(config, runs, values, gradient, inputs)
    else:
        for start, stop, decay in runs:
            adamw_step(
                values["master"][start:stop],
                gradient[start:stop],
                values["exp_avg"][start:stop],
                values["exp_avg_sq"][start:stop],
                step=inputs.step,
                lr=inputs.lr,
                beta1=config.adam_beta1,
                beta2=config.adam_beta2,
                eps=config.adam_eps,
                weight_decay=inputs.weight_decay if decay else 0.0,
                divisor=inputs.divisor,
                out=None if out is None else out[start:stop],
            )
        return
    if out is not None:
        out.copy_(values["master"])


def _adamw_on_cuda(
    config: OptimizerConfig, runs: Sequence[Run], values: Mapping[str, Tensor], gradient: Tensor, inputs: Inputs
) -> None:
    step = torch.full((), float(inputs.step), device=gradient.device)
    divisor = _on_device(inputs.divisor, gradient)
    for decay, chosen in _by_decay(runs):
        torch._fused_adamw_(
            [values["master"][start:stop] for start, stop in chosen],
            [gradient[start:stop] for start, stop in chosen],
            [values["exp_avg"][start:stop] for start, stop in chosen],
            [values["exp_avg_sq"][start:stop] for start, stop in chosen],
            [],
            [step] * len(chosen),
            lr=inputs.lr,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            weight_decay=inputs.weight_decay if decay else 0.0,
            eps=config.adam_eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,  # the kernel divides by it: torch's own GradScaler hands it over the same way
            found_inf=None,
        )


def _sgd(
    config: OptimizerConfig, runs: Sequence[Run], values: Mapping[str, Tensor], gradient: Tensor, inputs: Inputs
) -> None:
    for decay, chosen in _by_decay(runs):
        momenta = [values["momentum_buffer"][start:stop] for start, stop in chosen]
        torch._fused_sgd_(
            [values["master"][start:stop] for start, stop in chosen],
            [gradient[start:stop] for start, stop in chosen],
            momenta if config.sgd_momentum != 0.0 else [],
            weight_decay=inputs.weight_decay if decay else 0.0,
            momentum=config.sgd_momentum,
            lr=inputs.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,  # buffers begin at zero
            grad_scale=_on_device(inputs.divisor, gradient),
            found_inf=None,
        )


def _by_decay(runs: Sequence[Run]) -> list[tuple[bool, list[tuple[int, int]]]]:
    """The kernels take many tensors, and one weight decay."""
    found = [(decay, [(start, stop) for start, stop, its in runs if its == decay]) for decay in (False, True)]
    return [(decay, chosen) for decay, chosen in found if chosen]


def _on_device(divisor: float, like: Tensor) -> Tensor | None:
    return None if divisor == 1.0 else torch.full((), divisor, device=like.device)
