"""A normalization layer as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.spec.parameter import Init, ParamSpec, Shard, local_numel

RMS_NORM, LAYER_NORM = "RMSNorm", "LayerNorm"


@dataclass(frozen=True)
class NormSpec:
    """RMSNorm or LayerNorm over the last dim, of `size` channels. The weights are replicated.

    heads: RMSNorm over all channels of this many heads together, with a weight [heads, size] that is sharded over tp as
    they are. input_sharding: see ParamSpec. zero_centered: the stored weight is the factor minus one. has_weight,
    has_bias: whether these are trained; without them the factor is 1, and the bias of LayerNorm 0. RMSNorm has no bias.
    """

    size: int
    kind: str
    epsilon: float
    input_sharding: str = field(compare=False)
    zero_centered: bool = False
    heads: int | None = None
    has_weight: bool = True
    has_bias: bool = True

    def parameters(self) -> Iterator[tuple[str, ParamSpec]]:
        """(name, parameter), in the order of the module."""
        if self.has_weight:
            yield "weight", self._parameter(0.0 if self.zero_centered else 1.0)
        if self.kind == LAYER_NORM and self.has_bias:
            yield "bias", self._parameter(0.0)

    def local_channels(self, tp: int) -> int:
        """Channels of a row that one of `tp` ranks holds."""
        return local_numel(self._parameter(1.0), {"tp": tp})

    def _parameter(self, value: float) -> ParamSpec:
        init = Init("constant", value)
        if self.heads is None:
            return ParamSpec((self.size,), init, decay=False, input_sharding=self.input_sharding)
        return ParamSpec((self.heads, self.size), init, (Shard("tp", 0),), own_rows=0, decay=False)
