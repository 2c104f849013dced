"""The scores of attention: how the product of a query and a key becomes the number that the softmax sees."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron.kernels.ops.softcap import slope, softcap


class Scores(NamedTuple):
    """score = scale * product, capped smoothly at `softcap`; None does not cap.

    sinks [n]: one more score of every query of a head, which takes part in the softmax and has no value; None: there is
    none. Attention of blocks leaves it to whoever merges them: see attention_sinks.py.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def of_keys(self) -> Scores:
        """The scores of keys alone."""
        return self._replace(sinks=None)

    def of_heads(self, heads: slice) -> Scores:
        """Returns the scores of a part of the heads."""
        return self if self.sinks is None else self._replace(sinks=self.sinks[heads])

    @property
    def divisor(self) -> float:
        """1 / scale. Plain torch divides by it, because the usual one, the root of a head's size, is exact more
        often."""
        return 1.0 / self.scale

    @property
    def uncapped_scale(self) -> float:
        """The scale, for a kernel that has neither a cap nor sinks."""
        assert self.softcap is None, f"this kernel cannot cap scores at {self.softcap}"
        assert self.sinks is None, "this kernel has no sinks"
        return self.scale

    def capped(self, scores: Tensor) -> Tensor:
        """Returns scaled scores with the cap, or as they are without one. Differentiable."""
        return scores if self.softcap is None else softcap(scores, self.softcap)

    def slope(self, capped: Tensor) -> Tensor | None:
        """Returns the derivative of `capped` at its result, or None without a cap."""
        return None if self.softcap is None else slope(capped, self.softcap)
