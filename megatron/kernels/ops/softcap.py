"""Values that are capped smoothly: cap * tanh(x / cap) stays within +-cap (Gemma 2, arXiv 2408.00118, section 2)."""

from __future__ import annotations

from torch import Tensor


def softcap(x: Tensor, cap: float) -> Tensor:
    """Returns x, capped; differentiable."""
    return (x / cap).tanh_() * cap


def softcap_(x: Tensor, cap: float) -> Tensor:
    """Caps x in place, and returns it; not differentiable."""
    return x.div_(cap).tanh_().mul_(cap)


def slope(capped: Tensor, cap: float) -> Tensor:
    """Returns the derivative of `softcap` where its result is `capped`."""
    return (capped / cap).square_().neg_().add_(1.0)
