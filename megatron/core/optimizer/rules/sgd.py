"""Stochastic gradient descent with momentum, by torch's kernel."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.core.optimizer.update_rule import Inputs, UpdateRule


class SGD(UpdateRule):
    """State: "momentum_buffer", which begins at zero."""

    def apply(
        self,
        values: Mapping[str, Tensor],
        gradient: Tensor,
        inputs: Inputs,
        divisor: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """See UpdateRule."""
        for (lr, weight_decay), runs in self.runs_by_rates(inputs).items():
            momenta = [values["momentum_buffer"][elements] for elements in runs]
            torch._fused_sgd_(
                [values["master"][elements] for elements in runs],
                [gradient[elements] for elements in runs],
                momenta if self.config.sgd_momentum != 0.0 else [],
                weight_decay=weight_decay,
                momentum=self.config.sgd_momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
                grad_scale=divisor,
                found_inf=found_inf,
            )
