"""A normalization layer as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.spec.parameter import Init, ParamSpec

RMS_NORM, LAYER_NORM = "RMSNorm", "LayerNorm"


@dataclass(frozen=True)
class NormSpec:
    """RMSNorm or LayerNorm over the last dim, of `size` channels. The weights are replicated.

    input_sharding: see ParamSpec. zero_centered: the stored weight is the factor minus one. The epsilon may differ between
    two runs of the same model.
    """

    size: int
    kind: str
    epsilon: float = field(compare=False)
    input_sharding: str = field(compare=False)
    zero_centered: bool = False

    def parameters(self) -> Iterator[tuple[str, ParamSpec]]:
        """(name, parameter), in the order of the module."""
        yield "weight", self._parameter(0.0 if self.zero_centered else 1.0)
        if self.kind == LAYER_NORM:
            yield "bias", self._parameter(0.0)

    def _parameter(self, value: float) -> ParamSpec:
        return ParamSpec((self.size,), Init("constant", value), decay=False, input_sharding=self.input_sharding)
