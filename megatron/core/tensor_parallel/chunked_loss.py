"""The head and the loss of some tokens at a time, so that no tensor of all tokens x vocabulary exists.

[Note: the loss in backward] A training step knows the weight of every token before its forward, and reads the losses
when it ends. So it computes the head in backward: the logits of a chunk, their losses and their gradients follow each
other, and the chunk's memory is free before the next one begins. The head takes its three products, as with whole
logits, where a head that forward has computed already would take a fourth. Every gradient arrives when backward reaches
the head, so its reduction, its sharding and the order of messages stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.parameter import Parameter


@dataclass(frozen=True)
class TokenChunks:
    """The parts of a sequence of which sequence parallelism gives each of `shards` ranks a shard.

    A chunk consists of `length` neighbouring positions of every shard: gathered over tp, they are the hidden states
    that one rank slices from its own shard.
    """

    length: int
    shards: int

    @classmethod
    def of(cls, tokens: int, batch: int, shards: int) -> TokenChunks:
        """Returns chunks of at most `tokens` tokens of `batch` samples, and of at least one position per shard."""
        return cls(max(1, tokens // (batch * shards)), shards)

    def slices(self, hidden: Tensor) -> list[slice]:
        """Returns the positions of each chunk in this rank's shard of the hidden states [s / shards, b, h]."""
        positions = hidden.shape[0]
        return [slice(start, min(start + self.length, positions)) for start in range(0, positions, self.length)]

    def tokens(self, values: Tensor, positions: slice) -> Tensor:
        """Returns the [c, b] values of a chunk's tokens, of those of all tokens [s, b], in the order of a gather."""
        return values.unflatten(0, (self.shards, -1))[:, positions].flatten(0, 1)

    def write(self, values: Tensor, positions: slice, chunk: Tensor) -> None:
        """Writes the [c, b] values of a chunk's tokens into those of all tokens [s, b]."""
        values.unflatten(0, (self.shards, -1))[:, positions] = chunk.unflatten(0, (self.shards, -1))


# Hidden states [c / shards, b, h] and targets [c, b] of a chunk -> loss per token, fp32 [c, b].
ChunkLoss = Callable[[Tensor, Tensor], Tensor]


def chunked_loss(chunk_loss: ChunkLoss, hidden: Tensor, targets: Tensor, chunks: TokenChunks) -> Tensor:
    """hidden [s / shards, b, h], targets [s, b] -> loss per token, fp32 [s, b].

    Where gradients are wanted autograd keeps what each chunk saves, the logits among them. Communication: that of
    `chunk_loss`, once per chunk.
    """
    losses = [chunk_loss(hidden[part], chunks.tokens(targets, part)) for part in chunks.slices(hidden)]
    if len(losses) == 1:
        return losses[0]
    by_shard = [loss.unflatten(0, (chunks.shards, -1)) for loss in losses]
    return torch.cat(by_shard, dim=1).flatten(0, 1)


def loss_in_backward(
    chunk_loss: ChunkLoss, weights: Sequence[Parameter], hidden: Tensor, targets: Tensor, chunks: TokenChunks
) -> Tensor:
    """As `chunked_loss`, whose values and gradients are computed in backward: until then all losses are NaN.

    weights: the parameters that `chunk_loss` reads. If neither these nor `hidden` need a gradient, the losses are
    computed now.

    With several chunks the gradients of the weights are written in this backward, also where those of other layers are
    deferred: the operands of theirs would be as large as the logits.
    """
    trained = [weight for weight in weights if weight.requires_grad]
    if not torch.is_grad_enabled() or not (trained or hidden.requires_grad):
        return chunked_loss(chunk_loss, hidden, targets, chunks)
    losses: Tensor = _LossInBackward.apply(_Call(chunk_loss, targets, chunks), hidden, *trained)
    return losses


@dataclass(frozen=True)
class _Call:
    """The arguments that need no gradient."""

    chunk_loss: ChunkLoss
    targets: Tensor
    chunks: TokenChunks


class _LossInBackward(torch.autograd.Function):
    """(call, hidden, *weights) -> losses."""

    @staticmethod
    def forward(ctx: Any, call: _Call, hidden: Tensor, *weights: Parameter) -> Tensor:
        ctx.save_for_backward(hidden)
        losses = torch.full(call.targets.shape, math.nan, dtype=torch.float32, device=hidden.device)
        ctx.call, ctx.weights, ctx.losses = call, weights, losses.detach()
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        chunks, (hidden,) = call.chunks, ctx.saved_tensors
        parts = chunks.slices(hidden)
        wants_hidden: bool = ctx.needs_input_grad[1]
        hidden_grad = torch.empty_like(hidden) if wants_hidden and len(parts) > 1 else None
        weight_grads: list[Tensor | None] = [None] * len(ctx.weights)
        with _written_now(ctx.weights) if len(parts) > 1 else nullcontext():
            for part in parts:
                x = hidden[part].detach().requires_grad_(wants_hidden)
                with torch.enable_grad():
                    losses = call.chunk_loss(x, chunks.tokens(call.targets, part))
                chunks.write(ctx.losses, part, losses.detach())
                inputs = (x, *ctx.weights) if wants_hidden else ctx.weights
                gradients = list(torch.autograd.grad(losses, inputs, chunks.tokens(grad, part), allow_unused=True))
                del losses  # the logits, whose graph it holds
                if wants_hidden:
                    x_grad = gradients.pop(0)
                    if hidden_grad is None:
                        hidden_grad = x_grad
                    else:
                        hidden_grad[part] = x_grad
                weight_grads = [_sum(*pair) for pair in zip(weight_grads, gradients, strict=True)]
        return None, hidden_grad, *weight_grads


def _sum(total: Tensor | None, further: Tensor | None) -> Tensor | None:
    """Sums the gradients that chunks return; those that a layer writes into the main gradient itself are None."""
    if total is None or further is None:
        return further if total is None else total
    return total + further


@contextmanager
def _written_now(weights: Sequence[Parameter]) -> Iterator[None]:
    """In the body the gradients of these weights are not deferred."""
    slots = [slot for weight in weights if (slot := weight.slot) is not None]
    deferred = [slot.deferred for slot in slots]
    for slot in slots:
        slot.deferred = None
    yield
    for slot, jobs in zip(slots, deferred, strict=True):
        slot.deferred = jobs
