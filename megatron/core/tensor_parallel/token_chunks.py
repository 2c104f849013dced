"""Computations on some tokens at a time, whose backward repeats one chunk after the other.

A chunk's intermediate tensors exist only while the chunk is computed. Between forward and backward the inputs of all
tokens are saved, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.parameter import Parameter, deliver


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


# (positions of a chunk in this rank's shard, its part of each input [c, b, ...]) -> output [c, b, ...]
ChunkFunction = Callable[..., Tensor]


def run_in_chunks(
    function: ChunkFunction,
    rerun: ChunkFunction,
    weights: Sequence[Parameter],
    inputs: Sequence[Tensor],
    chunks: TokenChunks,
    dtype: torch.dtype,
    *,
    skip: bool = False,
) -> Tensor:
    """Returns the function of inputs [s / shards, b, ...], in the shape of the first one and in `dtype`, computed chunk
    by chunk, and once more in backward, by `rerun`.

    rerun: saves what the backward of `function` reads, and may leave out computations that only the result needs.
    weights: the parameters that `function` reads. skip: nothing is computed, and the values are undefined: for the
    second run of a recomputed region, of which only saved tensors are needed. Communication: that of `function`, once
    per chunk.
    """
    call = _Call(function, rerun, chunks, dtype, skip, len(inputs))
    if not torch.is_grad_enabled():
        return call.run(inputs)
    out: Tensor = _InChunks.apply(call, *inputs, *(weight for weight in weights if weight.requires_grad))
    return out


@dataclass(frozen=True)
class _Call:
    """The arguments of `run_in_chunks` that need no gradient."""

    function: ChunkFunction
    rerun: ChunkFunction
    chunks: TokenChunks
    dtype: torch.dtype
    skip: bool
    inputs: int  # their number

    def run(self, inputs: Sequence[Tensor]) -> Tensor:
        """Returns the result, chunk by chunk."""
        out = torch.empty_like(inputs[0], dtype=self.dtype)
        for part in () if self.skip else self.chunks.slices(inputs[0]):
            out[part] = self.function(part, *(x[part] for x in inputs))
        return out


class _InChunks(torch.autograd.Function):
    """(call, *inputs, *weights) -> function(inputs)."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        inputs, ctx.call, ctx.weights = tensors[: call.inputs], call, tensors[call.inputs :]
        ctx.save_for_backward(*inputs)
        return call.run(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        gradients = chunk_gradients(
            ctx.call.rerun,
            ctx.weights,
            inputs,
            ctx.call.chunks.slices(inputs[0]),
            lambda part: grad[part],
            wanted=ctx.needs_input_grad[1 : 1 + len(inputs)],
        )
        return None, *gradients


def chunk_gradients(
    run: ChunkFunction,
    weights: Sequence[Parameter],
    inputs: Sequence[Tensor],
    parts: Sequence[slice],
    grad_of: Callable[[slice], Tensor],
    *,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the inputs [s / shards, b, ...] that are `wanted`, None for the others, and of the
    weights. Runs each chunk, and then its backward.

    grad_of: positions -> gradient of the output of `run`. A weight whose gradient has a slot gets it there, and None
    here.

    With several chunks weight gradients are written now, also where those of other layers are deferred: the operands of
    all chunks would be as large as those of the whole.
    """
    whole = [torch.empty_like(x) if wants and len(parts) > 1 else None for x, wants in zip(inputs, wanted, strict=True)]
    weight_grads: list[Tensor | None] = [None] * len(weights)
    with _written_now(weights) if len(parts) > 1 else nullcontext():
        for part in parts:
            chunk = [x[part].detach().requires_grad_(wants) for x, wants in zip(inputs, wanted, strict=True)]
            with torch.enable_grad():
                out = run(part, *chunk)
            leaves = [x for x in chunk if x.requires_grad]
            gradients = list(torch.autograd.grad(out, (*leaves, *weights), grad_of(part), allow_unused=True))
            del out  # and its graph
            for place, x in enumerate(chunk):
                if not x.requires_grad:
                    continue
                chunk_grad, x_grad = gradients.pop(0), whole[place]
                if x_grad is None:
                    whole[place] = chunk_grad
                else:
                    x_grad[part] = chunk_grad
            for place, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
                if gradient is not None and (returned := deliver(weight, gradient)) is not None:
                    total = weight_grads[place]
                    weight_grads[place] = returned if total is None else total + returned
    return *whole, *weight_grads


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
