"""Bytes of a rank's weights, gradients and optimizer state, from the number of its parameters alone.

With P trained parameters on the rank, in half precision: weights 2 P / W, main gradients 4 P / G, masters 4 P / S and
adam's moments 8 P / S, where W, G and S are the numbers of ranks that share each (`Shards`). In fp32 the weights are 4 P / W
and need no masters. Frozen parameters (LoRA) need their weights alone, whole on every rank; parameters whose weights live in
host memory need no weights on the device. Buckets on the wire and activations are not in it (plan.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.data_parallel import LAST, DataParallelSettings
from megatron.config.optimizer import OptimizerConfig
from megatron.spec.optimizer_state import MASTER_KEYS, element_bytes
from megatron.spec.sizes import FP32


@dataclass(frozen=True)
class Shards:
    """The number of ranks that share each; 1 where every rank holds all of it."""

    weights: int
    gradients: int
    states: int


def shards_of(settings: DataParallelSettings, ranks: int) -> Shards:
    """ranks: those that share optimizer states. Gradients are shared where none is kept until the last microbatch."""
    return Shards(
        weights=ranks if settings.shards == "optim_grads_params" else 1,
        gradients=1 if settings.mode == LAST else ranks,
        states=ranks,
    )


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank."""

    weights: float
    main_gradients: float
    masters: float
    moments: float

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return self.weights + self.main_gradients + self.masters + self.moments


def weight_and_optimizer_footprint(
    parameters: int,
    optimizer: OptimizerConfig,
    shards: Shards,
    *,
    half: bool,
    frozen: int = 0,
    offloaded: int = 0,
) -> Footprint:
    """The footprint of a rank without padding.

    parameters: the rank's trained ones, after tp and pp have divided the model; frozen: those that are not trained;
    offloaded: the trained ones whose weights live in host memory. half: the model is not fp32.
    """
    states = element_bytes(optimizer, half=half, on_cpu=False)
    masters = sum(size for key, size in states.items() if key in MASTER_KEYS)
    return Footprint(
        weights=((parameters - offloaded) / shards.weights + frozen) * (FP32 // 2 if half else FP32),
        main_gradients=parameters * FP32 / shards.gradients,
        masters=parameters * masters / shards.states,
        moments=parameters * (sum(states.values()) - masters) / shards.states,
    )
