"""The residual stream of a decoder, between two additions.

[Note: pending addition]
A layer reads as in the literature: h = x + attention(norm(x)), and the result is h + mlp(norm(h)). x is a tensor, or a
`Residual`, to which a layer adds in the same way. Where one kernel computes a sum and its norm, the stream is a
`Residual`: it holds the last output that was added apart from the sum of all others, until the norm behind it reads
both. Without such a kernel the stream is a tensor, and an addition is computed at once.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Residual:
    """A residual stream [s or s/tp, b, h] whose last addition may be pending."""

    def __init__(self, x: Tensor, pending: Tensor | None = None) -> None:
        """pending: a tensor of the shape of x that is to be added to it."""
        self._x, self._pending = x, pending

    def __add__(self, branch: Tensor) -> Residual:
        return Residual(self.total(), branch)

    @property
    def is_pending(self) -> bool:
        """Whether an addition is pending."""
        return self._pending is not None

    def total(self) -> Tensor:
        """Returns the stream with all additions."""
        if self._pending is not None:
            self._x, self._pending = self._x + self._pending, None
        return self._x

    def added_by(self, add_norm: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """Leaves the pending addition to `add_norm`, which returns (the sum, its norm). Returns the norm."""
        assert self._pending is not None
        (self._x, out), self._pending = add_norm(self._x, self._pending), None
        return out

    def marked(self, mark: Callable[[Tensor], Tensor]) -> Residual:
        """Returns the stream with `mark` applied where its backward begins:
        to the pending addition, if there is one."""
        if self._pending is None:
            return Residual(mark(self._x))
        return Residual(self._x, mark(self._pending))


def total(x: Tensor | Residual) -> Tensor:
    """Returns a residual stream as a tensor."""
    return x if isinstance(x, Tensor) else x.total()
