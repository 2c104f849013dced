"""The bytes of a rank's weights, gradients and optimizer state, computed from the number of its parameters alone.

P trained parameters on a rank take, in half precision, 2 P / W bytes of weights, 4 P / G of main gradients (2 P / G in
bf16), 4 P / S of masters and 8 P / S of adam's moments, where W, G and S are the numbers of ranks that share each
(`Shards`). In fp32 the weights take 4 P / W and there are no masters. Frozen parameters (LoRA) take only their weights,
whole on every rank. Parameters whose weights live in host memory take no weights on the device. Buckets in flight and
activations are not included; plan.py plans them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.data_parallel import LAST, DataParallelSettings
from megatron.config.optimizer import OptimizerConfig
from megatron.spec.optimizer_state import MASTER_KEYS, element_bytes
from megatron.spec.sizes import FP32


@dataclass(frozen=True)
class Shards:
    """The number of ranks that share each kind of memory; 1 if every rank holds all of it."""

    weights: int
    gradients: int
    states: int


def shards_of(settings: DataParallelSettings, ranks: int) -> Shards:
    """Returns the shards under these settings. ranks: those that share the optimizer's state.

    Gradients are shared if they are reduced after every microbatch, so that no rank keeps whole ones.
    """
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
    """Returns the footprint of a rank, without the padding of buckets.

    parameters: the number of trained parameters on the rank. frozen: the number of those that are not trained.
    offloaded: the number of trained ones whose weights live in host memory. half: the model is not fp32.
    """
    states = element_bytes(optimizer, half=half, on_cpu=False)
    masters = sum(size for key, size in states.items() if key in MASTER_KEYS)
    return Footprint(
        weights=((parameters - offloaded) / shards.weights + frozen) * (FP32 // 2 if half else FP32),
        main_gradients=parameters * optimizer.main_grad_bytes / shards.gradients,
        masters=parameters * masters / shards.states,
        moments=parameters * (sum(states.values()) - masters) / shards.states,
    )
