"""The activation of experts times the weights of their assignments: what the second product reads.

A assignments; inner [A, 2 f], or [A, f] without a gate, in the dtype of the model; weights [A] fp32. Nothing here is
differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from megatron.kernels.ops.activation import Activation


class WeightedActivation(Protocol):
    """activation(inner) x weight, both rounded once."""

    def keep(self, inner: Tensor) -> Tensor | None:
        """Returns what `product` and `gradient` would compute again, [A, f]; None if they do not need it."""
        ...

    def product(self, inner: Tensor, saved: Tensor | None, weights: Tensor) -> Tensor:
        """Returns activation x weight, [A, f]. saved: as `keep` returned it, or None."""
        ...

    def gradient(
        self,
        grad: Tensor,
        inner: Tensor,
        saved: Tensor | None,
        weights: Tensor,
        *,
        take: Callable[[Tensor], None] | None,
        wants_inner: bool,
    ) -> tuple[Tensor | None, Tensor]:
        """From grad [A, f] of the product, which may be overwritten: gradients of inner (None unless wanted) and of the
        weights [A] fp32. take: is given the product again, if it is not None.
        """
        ...


class Separate:
    """The reference: one operation after the other."""

    def __init__(self, activation: Activation) -> None:
        self._activation = activation

    def keep(self, inner: Tensor) -> Tensor | None:
        """See WeightedActivation: the activation."""
        return self._activation(inner)

    def product(self, inner: Tensor, saved: Tensor | None, weights: Tensor) -> Tensor:
        """See WeightedActivation."""
        return _weighted(self._activation(inner) if saved is None else saved, weights, in_place=saved is None)

    def gradient(
        self,
        grad: Tensor,
        inner: Tensor,
        saved: Tensor | None,
        weights: Tensor,
        *,
        take: Callable[[Tensor], None] | None,
        wants_inner: bool,
    ) -> tuple[Tensor | None, Tensor]:
        """See WeightedActivation."""
        activated = self._activation(inner) if saved is None else saved
        grad_weights = (grad * activated.to(weights.dtype)).sum(dim=-1)
        if take is not None:
            take(_weighted(activated, weights, in_place=saved is None))
        del activated
        if not wants_inner:
            return None, grad_weights
        return self._activation.gradient_of_input(_weighted(grad, weights, in_place=True), inner), grad_weights


def _weighted(values: Tensor, weights: Tensor, *, in_place: bool) -> Tensor:
    """values [A, f] times weights [A], rounded once."""
    out = values if in_place else torch.empty_like(values)
    return torch.mul(values, weights.unsqueeze(-1), out=out)
