"""Low-rank adapters as data (LoRA, Hu et al., arXiv 2106.09685): y = W x + alpha / rank * B A dropout(x).

W is frozen; A [rank, in] starts random, B [out, rank] at zero. Every projection has its own pair, also where several
share one weight of ours: so an adapter is one of PEFT's, in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron.spec.linear import COLUMN, REPLICATED, LinearSpec, Projection
from megatron.spec.parameter import SEQUENCE, Init, ParamSpec, Shard


@dataclass(frozen=True)
class LoraSpec:
    """The adapters of a model. `projections` are the projections with an adapter, by transformers' names."""

    rank: int
    alpha: float
    projections: tuple[str, ...]
    dropout: float = field(compare=False)

    @property
    def scale(self) -> float:
        """Factor on an adapter's output."""
        return self.alpha / self.rank

    def adapts(self, linear: LinearSpec) -> bool:
        """Whether a linear layer has an adapter."""
        return any(projection.name in self.projections for projection in linear.projections)

    def pair(self, linear: LinearSpec, projection: Projection) -> tuple[ParamSpec, ParamSpec]:
        """A and B. Over tp, B is sharded with a column layer's outputs, A with a row layer's inputs; the other is
        whole, and so are both of a replicated layer."""
        a_shape, b_shape = (self.rank, linear.in_features), (*projection.outputs.shape, self.rank)
        # PEFT's initial values: Kaiming-uniform with a = sqrt(5), which is 1 / sqrt(in).
        random, zero = Init("uniform", 1.0 / math.sqrt(linear.in_features)), Init("constant", 0.0)
        if linear.parallel == COLUMN:
            return (
                ParamSpec(a_shape, random, input_sharding=SEQUENCE),
                ParamSpec(b_shape, zero, (Shard("tp", linear.dim),), own_rows=projection.own_rows),
            )
        b = ParamSpec(b_shape, zero, input_sharding=SEQUENCE)
        if linear.parallel == REPLICATED:
            return ParamSpec(a_shape, random, input_sharding=SEQUENCE), b
        return ParamSpec(a_shape, random, (Shard("tp", 1),)), b

    def multiply_adds(self, linears: Iterable[LinearSpec]) -> int:
        """Per token, of the adapters of these layers: as many as their parameters."""
        return sum(
            self.rank * (linear.in_features + projection.outputs.numel)
            for linear in linears
            for projection in linear.projections
            if projection.name in self.projections
        )


def adapter_names(linear: str, projection: str) -> tuple[str, str]:
    """Names of A and B of a projection; `linear` is the name of the layer that they adapt."""
    return f"{linear}.lora.{projection}.a", f"{linear}.lora.{projection}.b"


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora." in name


def adapted_weight(name: str) -> str:
    """Name of the weight that an adapter's parameter adapts; of any other parameter its own."""
    linear, dot, _ = name.partition(".lora.")
    return f"{linear}.weight" if dot else name
