"""The scores of attention: how the product of a query and a key becomes the number that the softmax sees."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron.kernels.ops.softcap import slope, softcap


class Scores(NamedTuple):
    """score = scale * product, capped smoothly at `softcap`; None does not cap."""

    scale: float
    softcap: float | None = None

    @property
    def divisor(self) -> float:
        """1 / scale. Plain torch divides by it, because the usual one, the root of a head's size, is exact more
        often."""
        return 1.0 / self.scale

    @property
    def uncapped_scale(self) -> float:
        """The scale, for a kernel that cannot cap."""
        assert self.softcap is None, f"this kernel cannot cap scores at {self.softcap}"
        return self.scale

    def capped(self, scores: Tensor) -> Tensor:
        """Returns scaled scores with the cap, or as they are without one. Differentiable."""
        return scores if self.softcap is None else softcap(scores, self.softcap)

    def slope(self, capped: Tensor) -> Tensor | None:
        """Returns the derivative of `capped` at its result, or None without a cap."""
        return None if self.softcap is None else slope(capped, self.softcap)
