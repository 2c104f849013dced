"""What a rank's weights and their optimizer must use, from the number of parameters alone.

Bytes of weights and optimizer state, with P parameters on the rank, and S ranks that share the optimizer's state
(S = dp x cp / instances when it is sharded, 1 when every replica holds all of it). G is S when gradients are sharded,
too (optim_grads and optim_grads_params), else 1; W is S when weights are (optim_grads_params), else 1:

| | bf16, fp16 | fp32 |
|---|---|---|
| weights | 2 P / W | 4 P / W |
| main gradients, fp32 | 4 P / G | 4 P / G |
| master weights, fp32 | 4 P / S | 0: the weights are the masters |
| moments, fp32 (Adam 2, SGD with momentum 1, without 0) | 4 moments P / S | the same |

So bf16 with Adam takes 18 P unsharded, 6 P + 12 P / S with a sharded optimizer, 2 P + 16 P / S with sharded gradients,
18 P / S with sharded weights. Frozen parameters (LoRA) cost their weights alone, whole on every rank; those whose weights
live in host memory cost no weights. Buckets in flight and activations are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.optimizer import OptimizerConfig

_FP32 = 4


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
    dtype_name: str,
    optimizer: OptimizerConfig,
    shards: int,
    sharding: str = "optim",
    *,
    frozen: int = 0,
    far: int = 0,
) -> Footprint:
    """What `parameters` on this rank cost; see the table above.

    parameters: those of this rank that are trained, after tp and pp have cut the model; frozen: those that are not; far:
    of the trained ones those whose weights live in host memory.
    dtype_name: as ModelConfig.dtype_name. shards: ranks that share masters and moments. sharding: a
    --data-parallel-sharding-strategy.
    """
    grad_shards = shards if sharding in ("optim_grads", "optim_grads_params") else 1
    weight_shards = shards if sharding == "optim_grads_params" else 1
    low_precision = dtype_name != "float32"
    moments = 2 if optimizer.rule == "adam" else int(optimizer.sgd_momentum != 0.0)
    return Footprint(
        weights=((parameters - far) / weight_shards + frozen) * (2 if low_precision else _FP32),
        main_gradients=parameters * _FP32 / grad_shards,
        masters=parameters * _FP32 / shards if low_precision else 0.0,
        moments=parameters * _FP32 * moments / shards,
    )
