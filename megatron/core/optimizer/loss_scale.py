"""Loss scaling for fp16: a scaled loss keeps small gradients above the smallest fp16 number; overflows skip the step.

The scale lives on the device, which decides whether a step is skipped: the next forward is queued with a scale that the
host does not know yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig


class LossScale:
    """A fixed scale, or a dynamic one that overflows halve and a window of good steps doubles.

    Source: Micikevicius et al., arXiv 1710.03740.
    """

    def __init__(self, config: OptimizerConfig, fp16: bool, device: torch.device) -> None:
        """Without fp16 the scale is always 1."""
        self.dynamic = fp16 and config.loss_scale is None
        self._config = config
        value = (config.loss_scale or config.initial_loss_scale) if fp16 else 1.0
        self._state = self._on_device(value, 0, config.hysteresis, device)

    @property
    def value(self) -> Tensor:
        """The scale, fp64 []. `update` leaves a tensor that was returned before as it is."""
        return self._state[0]

    def update(self, overflow: Tensor) -> None:
        """Adapts the scale after a step. overflow: bool []. The host does not wait."""
        if not self.dynamic:
            return
        value, good_steps, hysteresis = self._state.unbind()
        lower = torch.where(hysteresis <= 1, (value / 2.0).clamp(min=self._config.min_loss_scale), value)
        full = good_steps + 1 == self._config.loss_scale_window
        after_good_step = torch.stack(
            [
                torch.where(full, 2.0 * value, value),
                torch.where(full, 0.0, good_steps + 1),
                torch.where(full, float(self._config.hysteresis), hysteresis),
            ]
        )
        after_overflow = torch.stack([lower, torch.zeros_like(value), hysteresis - 1])
        self._state = torch.where(overflow, after_overflow, after_good_step)

    def state(self) -> dict[str, float]:
        """Returns the state for a checkpoint. The host waits for the device."""
        value, good_steps, hysteresis = self._state.tolist()
        return {"value": value, "good_steps": int(good_steps), "hysteresis": int(hysteresis)}

    def load_state(self, state: dict[str, float]) -> None:
        """Takes over what `state` returned; a fixed scale keeps the value of its flag."""
        if self.dynamic:
            self._state = self._on_device(state["value"], state["good_steps"], state["hysteresis"], self._state.device)

    def _on_device(self, value: float, good_steps: float, hysteresis: float, device: torch.device) -> Tensor:
        return torch.tensor([value, good_steps, hysteresis], dtype=torch.float64, device=device)
