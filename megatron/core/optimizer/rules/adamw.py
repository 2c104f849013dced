"""AdamW (Loshchilov and Hutter, arXiv 1711.05101).

It takes one pass: of a Triton kernel on CUDA, and of kernels/ops/adam.py on the CPU. CUDA without Triton takes two
kernels of torch, of which one returns at once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.core.optimizer.update_rule import Inputs, UpdateRule
from megatron.kernels.ops.adam import Coefficients, adamw_step


class AdamW(UpdateRule):
    """State: "exp_avg" and "exp_avg_sq", the means of gradients and of their squares."""

    def step(self, values: Mapping[str, Tensor], gradient: Tensor, out: Tensor | None, inputs: Inputs) -> None:
        """See UpdateRule."""
        if self.one_pass is not None:
            moments = values["exp_avg"], values["exp_avg_sq"]
            self.one_pass.step(values["master"], gradient, *moments, out, inputs.gate, self._coefficients(inputs))
        elif gradient.is_cuda:
            super().step(values, gradient, out, inputs)
        else:
            self.step_on_cpu(values, gradient, out, inputs)

    def step_on_cpu(self, values: Mapping[str, Tensor], gradient: Tensor, out: Tensor | None, inputs: Inputs) -> None:
        """See UpdateRule. Writes `out` in the same pass."""
        divisor, not_plain, not_divided = inputs.gate.unbind()
        if not_plain.numpy() and not_divided.numpy():
            if out is not None:
                out.copy_(values["master"])
            return
        config = self.config
        for run in self.runs:
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
                divisor=float(divisor.numpy()),
                out=None if out is None else out[elements],
            )

    def apply(
        self,
        values: Mapping[str, Tensor],
        gradient: Tensor,
        inputs: Inputs,
        divisor: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """See UpdateRule. By torch's kernel."""
        step = torch.full((), float(inputs.step), device=gradient.device)
        for (lr, weight_decay), runs in self.runs_by_rates(inputs).items():
            torch._fused_adamw_(
                [values["master"][elements] for elements in runs],
                [gradient[elements] for elements in runs],
                [values["exp_avg"][elements] for elements in runs],
                [values["exp_avg_sq"][elements] for elements in runs],
                [],
                [step] * len(runs),
                lr=lr,
                beta1=self.config.adam_beta1,
                beta2=self.config.adam_beta2,
                weight_decay=weight_decay,
                eps=self.config.adam_eps,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,  # the kernel divides by it: torch's own GradScaler hands it over the same way
                found_inf=found_inf,
            )

    def _coefficients(self, inputs: Inputs) -> Coefficients:
        return Coefficients(
            inputs.step,
            inputs.lr,
            inputs.decoupled_lr,
            self.config.adam_beta1,
            self.config.adam_beta2,
            self.config.adam_eps,
            inputs.weight_decay,
        )
