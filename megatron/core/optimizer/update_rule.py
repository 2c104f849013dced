"""AdamW and SGD over flat tensors. AdamW takes one pass: of a Triton kernel on CUDA, and of kernels/ops/adam.py on the CPU.
SGD, and CUDA without Triton, take two kernels of torch, of which one returns at once.

Loss unscaling and clipping need no further pass: both are part of one divisor of the gradients. The device that updates
decides itself whether it does: the host does not wait for the gradient's norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.kernels.ops.adam import AdamRun, Coefficients, DeviceAdamW, adamw_step


def gate_of(divisor: Tensor, found_inf: Tensor) -> Tensor:
    """Returns fp32 [3]: the divisor of the gradients; 1 or 0, 1 if a kernel must not use them as they are; the same, if a
    kernel must not divide them. Both are 1, and nothing changes, if a gradient is not finite.

    divisor: fp64 []. found_inf: bool []. No kernel divides by 1: torch's write the divided gradient back to memory.
    """
    is_one = divisor.float() == 1.0
    return torch.stack([divisor, (found_inf | ~is_one).double(), (found_inf | is_one).double()]).float()


@dataclass(frozen=True)
class Inputs:
    """The scalars of one step. step: 1 for the first update.

    decoupled_lr: the learning rate of the word embeddings and of the output layer, whose runs are decoupled; lr is that of
    all others.
    gate: fp32 [3], where the update takes place; see `gate_of`.
    """

    step: int
    lr: float
    decoupled_lr: float
    weight_decay: float
    gate: Tensor

    def rates(self, run: AdamRun) -> tuple[float, float]:
        """Returns (learning rate, weight decay) of a run."""
        return self.decoupled_lr if run.decoupled else self.lr, self.weight_decay if run.decay else 0.0


def update(
    config: OptimizerConfig,
    runs: Sequence[AdamRun],
    values: Mapping[str, Tensor],
    gradient: Tensor,
    out: Tensor | None,
    inputs: Inputs,
    one_pass: DeviceAdamW | None = None,
) -> None:
    """Updates `values` ("master" and moments, flat and in fp32) in place with a gradient; all are on the same device.

    out: receives the masters, rounded to its dtype, if it is given. one_pass: the device's AdamW of these runs. On CUDA the
    gradient is undefined afterwards.
    """
    if one_pass is not None:
        master, moments = values["master"], (values["exp_avg"], values["exp_avg_sq"])
        one_pass.step(master, gradient, *moments, out, inputs.gate, _coefficients(config, inputs))
        return
    divisor, not_plain, not_divided = inputs.gate.unbind()
    if gradient.is_cuda:
        gated(config, runs, values, gradient, inputs)
    elif not (not_plain.numpy() and not_divided.numpy()):  # of host memory: there is nothing to wait for
        if config.rule == "adam":
            _adamw_on_cpu(config, runs, values, gradient, out, inputs, float(divisor.numpy()))
            return
        _sgd(config, runs, values, gradient, inputs, divisor if not_plain.numpy() else None, None)
    if out is not None:
        out.copy_(values["master"])


def _coefficients(config: OptimizerConfig, inputs: Inputs) -> Coefficients:
    return Coefficients(
        inputs.step,
        inputs.lr,
        inputs.decoupled_lr,
        config.adam_beta1,
        config.adam_beta2,
        config.adam_eps,
        inputs.weight_decay,
    )


def gated(
    config: OptimizerConfig, runs: Sequence[AdamRun], values: Mapping[str, Tensor], gradient: Tensor, inputs: Inputs
) -> None:
    """Updates `values` by torch's kernels, without the host knowing the gate: both are queued, and at most one of them
    does anything."""
    kernel = _sgd if config.rule == "sgd" else _adamw
    divisor, not_plain, not_divided = inputs.gate.unbind()
    kernel(config, runs, values, gradient, inputs, None, not_plain)
    kernel(config, runs, values, gradient, inputs, divisor, not_divided)


def _adamw_on_cpu(
    config: OptimizerConfig,
    runs: Sequence[AdamRun],
    values: Mapping[str, Tensor],
    gradient: Tensor,
    out: Tensor | None,
    inputs: Inputs,
    divisor: float,
) -> None:
    """Also writes `out`, in the same pass."""
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
            divisor=divisor,
            out=None if out is None else out[elements],
        )


def _adamw(
    config: OptimizerConfig,
    runs: Sequence[AdamRun],
    values: Mapping[str, Tensor],
    gradient: Tensor,
    inputs: Inputs,
    divisor: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    step = torch.full((), float(inputs.step), device=gradient.device)
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
            found_inf=found_inf,
        )


def _sgd(
    config: OptimizerConfig,
    runs: Sequence[AdamRun],
    values: Mapping[str, Tensor],
    gradient: Tensor,
    inputs: Inputs,
    divisor: Tensor | None,
    found_inf: Tensor | None,
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
            grad_scale=divisor,
            found_inf=found_inf,
        )


def _by_rates(runs: Sequence[AdamRun], inputs: Inputs) -> dict[tuple[float, float], list[slice]]:
    """Groups the runs by learning rate and weight decay: a kernel takes many tensors but one value of each."""
    found: dict[tuple[float, float], list[slice]] = {}
    for run in runs:
        found.setdefault(inputs.rates(run), []).append(slice(run.start, run.stop))
    return found
