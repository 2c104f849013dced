"""Loss scaling for fp16: a scaled loss keeps small gradients above the smallest fp16 number; overflows skip the step."""

from __future__ import annotations

from megatron.config.optimizer import OptimizerConfig


class LossScale:
    """A fixed scale, or a dynamic one that overflows halve and a window of good steps doubles.

    Source: Micikevicius et al., arXiv 1710.03740.
    """

    def __init__(self, config: OptimizerConfig, fp16: bool) -> None:
        """Without fp16 the scale is always 1."""
        self.dynamic = fp16 and config.loss_scale is None
        self.value = (config.loss_scale or config.initial_loss_scale) if fp16 else 1.0
        self._config = config
        self._good_steps = 0
        self._hysteresis = config.hysteresis

    def update(self, overflow: bool) -> None:
        """Adapts the scale after a step."""
        if not self.dynamic:
            return
        if overflow:
            self._good_steps = 0
            self._hysteresis -= 1
            if self._hysteresis <= 0:
                self.value = max(self.value / 2.0, self._config.min_loss_scale)
            return
        self._good_steps += 1
        if self._good_steps == self._config.loss_scale_window:
            self._good_steps = 0
            self._hysteresis = self._config.hysteresis
            self.value *= 2.0

    def state(self) -> dict[str, float]:
        """Returns the state for a checkpoint."""
        return {"value": self.value, "good_steps": self._good_steps, "hysteresis": self._hysteresis}

    def load_state(self, state: dict[str, float]) -> None:
        """Takes over what `state` returned; a fixed scale keeps the value of its flag."""
        if self.dynamic:
            self.value = state["value"]
            self._good_steps, self._hysteresis = int(state["good_steps"]), int(state["hysteresis"])
