"""A linear layer as data."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.base.box import Box
from megatron.spec.parameter import SEQUENCE, Init, ParamSpec, Shard, local_shape

COLUMN, ROW, REPLICATED = "column", "row", "replicated"


@dataclass(frozen=True)
class Projection:
    """Outputs of a linear layer that other formats store as a weight of its own, under transformers' and PEFT's name.

    outputs: a box of the layer's `out_shape`. own_rows: see spec.parameter.shard, for these outputs alone.
    """

    name: str
    outputs: Box
    own_rows: int | None = None


@dataclass(frozen=True)
class LinearSpec:
    """y = x W^T + b, with the weight [*out_shape, in_features] sharded over tp.

    COLUMN: the outputs are sharded, along `dim` of `out_shape` (with `own_rows` as spec.parameter.shard says). ROW: the
    inputs are sharded; the bias is replicated and added once. REPLICATED: every rank holds the weight, and multiplies
    its part of the sequence. projections: all of the outputs, in order.
    """

    in_features: int
    out_shape: tuple[int, ...]
    parallel: str
    projections: tuple[Projection, ...]
    has_bias: bool = False
    init: Init = field(default=Init("normal", 0.02), compare=False)
    dim: int = 0
    own_rows: int | None = None
    embedding_or_output: bool = field(default=False, compare=False)

    @property
    def weight(self) -> ParamSpec:
        """[*out_shape, in_features]."""
        shape = (*self.out_shape, self.in_features)
        if self.parallel == REPLICATED:
            return ParamSpec(shape, self.init, input_sharding=SEQUENCE)
        dim = self.dim if self.parallel == COLUMN else len(self.out_shape)
        return ParamSpec(
            shape,
            self.init,
            (Shard("tp", dim),),
            own_rows=self.own_rows,
            embedding_or_output=self.embedding_or_output,
        )

    @property
    def bias(self) -> ParamSpec | None:
        """[*out_shape], or None."""
        if not self.has_bias:
            return None
        zero = Init("constant", 0.0)
        if self.parallel != COLUMN:
            return ParamSpec(self.out_shape, zero, decay=False, input_sharding=SEQUENCE)
        return ParamSpec(
            self.out_shape,
            zero,
            (Shard("tp", self.dim),),
            own_rows=self.own_rows,
            decay=False,
            embedding_or_output=self.embedding_or_output,
        )

    def parameters(self) -> Iterator[tuple[str, ParamSpec]]:
        """(name, parameter), in the order of the module."""
        yield "weight", self.weight
        if self.bias is not None:
            yield "bias", self.bias

    @property
    def join(self) -> int:
        """The dim of `out_shape` along which the projections follow each other."""
        offsets = [projection.outputs.offset for projection in self.projections]
        return next((dim for dim in range(len(self.out_shape)) if len({offset[dim] for offset in offsets}) > 1), 0)

    @property
    def multiply_adds(self) -> int:
        """Per token, of the global layer."""
        return self.in_features * math.prod(self.out_shape)

    @functools.lru_cache(maxsize=1024)  # noqa: B019 (specs are few and small)
    def local_features(self, tp: int) -> tuple[int, int]:
        """(inputs, outputs) of one of `tp` ranks."""
        *outputs, inputs = local_shape(self.weight, {"tp": tp})
        return inputs, math.prod(outputs)
