"""The head and the loss of some tokens at a time, so that no tensor of all tokens x vocabulary exists.

[Note: the loss in backward] A training step knows the weight of every token before its forward, and reads the losses
when it ends. So it computes the head in backward: the logits of a chunk, their losses and their gradients follow each
other, and the chunk's memory is free before the next one begins. The head takes its three products, as with whole
logits, where a head that forward has computed already would take a fourth. Every gradient arrives when backward reaches
the head, so its reduction, its sharding and the order of messages stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.parameter import Parameter
from megatron.core.tensor_parallel.token_chunks import TokenChunks, chunk_gradients

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

    weights: the parameters that `chunk_loss` reads, whose gradients `chunk_gradients` computes. If neither these nor
    `hidden` need a gradient, the losses are computed now.
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
        (hidden,) = ctx.saved_tensors
        call: _Call = ctx.call

        def run(part: slice, chunk: Tensor) -> Tensor:
            losses = call.chunk_loss(chunk, call.chunks.tokens(call.targets, part))
            call.chunks.write(ctx.losses, part, losses.detach())
            return losses

        gradients = chunk_gradients(
            run,
            ctx.weights,
            [hidden],
            call.chunks.slices(hidden),
            lambda part: call.chunks.tokens(grad, part),
            wanted=ctx.needs_input_grad[1:2],
        )
        return None, *gradients
