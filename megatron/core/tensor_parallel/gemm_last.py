"""GEMM-last: a cheap operation directly before a product is computed again in the product's backward, and not kept.

Megatron-Kwai's (Yuan et al., USENIX ATC 2024). A linear layer needs its input again for the gradient of its weight.
Where that input is the result of a norm or an activation, the layer keeps what the norm or activation read, which
somebody keeps anyway, and computes the result again just before that gradient. No product is computed twice.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Prologue(Protocol):
    """A norm or an activation, whole and in its two halves. No communication; dims but the last are independent."""

    def __call__(self, x: Tensor) -> Tensor:
        """The operation under autograd."""
        ...

    def operands(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the halves work on: x, converted if need be, and parameters. Differentiable."""
        ...

    def compute(self, *operands: Tensor) -> tuple[Tensor, Any]:
        """(the result, bit for bit that of the call, and the further inputs of `gradient`). Not differentiable."""
        ...

    def gradient(self, grad: Tensor, saved: Any, *operands: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the operands. Not differentiable."""
        ...


class Kept:
    """Operands of a product as its backward finds them: its input, or what a prologue makes it from."""

    def __init__(self, prologue: Prologue | None, operands: tuple[Tensor | None, ...]) -> None:
        self._prologue, self._operands = prologue, operands
        self._rest: Any = None

    def input(self) -> Tensor:
        """The product's input, computed again where there is a prologue."""
        if self._prologue is None:
            (x,) = self._operands
        else:
            x, self._rest = self._prologue.compute(*_all(self._operands))
        assert x is not None
        return x

    def gradients(self, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the operands from that of the product's input. After `input`."""
        if self._prologue is None or grad is None:
            return (grad, *(None for _ in self._operands[1:]))
        return self._prologue.gradient(grad, self._rest, *_all(self._operands))


def _all(operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    assert all(operand is not None for operand in operands)
    return operands  # type: ignore[return-value]
