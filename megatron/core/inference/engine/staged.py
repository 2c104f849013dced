"""A model whose layers are distributed over several pipeline ranks, for inference without backward.

[Note: overlap of stages]
A step of generation needs the token of the step before, so only one stage works at a time: pipeline ranks share the
memory of a model and of its cache, but do not shorten a step. Batches that are independent of each other (scores)
follow one another through the stages, because a send does not wait for its receiver.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.comm.collectives import broadcast
from megatron.core.comm.pipeline_messages import Mailbox
from megatron.core.models.gpt import GPTModel
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from megatron.core.transformer.context import Build, LayerCache
from megatron.core.transformer.moe.microbatch import MicrobatchRouting
from megatron.kernels.ops.attention_segments import Segments
from megatron.spec.attention import CoreSpec
from megatron.spec.delta_net import DeltaCoreSpec
from megatron.spec.moe import MoESpec, RouterSpec


class StagedModel:
    """The whole model, on every pipeline rank; each has one stage of it and passes the same tokens.

    With one pipeline rank it is the model itself, and nothing is communicated.
    """

    def __init__(self, model: GPTModel, build: Build) -> None:
        """`model` is in evaluation mode; its only stage has the number of its pipeline rank."""
        self._model, self._build, self._pp = model, build, build.groups.pp
        self._mailbox = Mailbox(build.groups, Streams(build.device, Timeline(build.device)))

    @property
    def cached(self) -> list[CoreSpec | DeltaCoreSpec]:
        """The heads whose keys and values each layer on this rank keeps, or whose states, in order."""
        layers = self._model.stages[self._pp.rank].layers
        return [self._build.spec.layers[number].attention.cached for number in layers]

    @property
    def routers(self) -> dict[int, RouterSpec]:
        """The layers on this rank that have experts, in order, with their routers."""
        layers = self._model.stages[self._pp.rank].layers
        pairs = ((number, self._build.spec.layers[number].mlp) for number in layers)
        return {number: mlp.router for number, mlp in pairs if isinstance(mlp, MoESpec)}

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Segments | None = None,
        caches: Sequence[LayerCache] | None = None,
        *,
        lengths: Tensor | None = None,
        routing: MicrobatchRouting | None = None,
    ) -> Tensor | None:
        """Returns the input of the head [s, b, h] on the last rank, None on the others. `caches` are those of this
        rank's layers; `lengths` and `routing`: see GPTModel.

        Communication: hidden states [s, b, h] from the previous rank and to the next one, and the stage's own.
        """
        rank, received = self._pp.rank, self._received(tokens)
        out = self._model.hidden(
            tokens, positions, segments, caches, lengths=lengths, routing=routing, stage=rank, received=received
        )
        return self._passed_on(out)

    def losses(
        self, tokens: Tensor, positions: Tensor, labels: Tensor, segments: Segments | None = None
    ) -> Tensor | None:
        """Returns the loss per token [b, s] on the last rank, as training computes it, None on the others.

        Arguments: see GPTModel. Communication: as of `hidden`, and that of the loss.
        """
        rank, received = self._pp.rank, self._received(tokens)
        out = self._model(tokens, positions, labels, segments, stage=rank, received=received)
        losses = self._passed_on(out)
        self._mailbox.flush()
        return losses

    def _received(self, tokens: Tensor) -> Tensor | None:
        """Returns the hidden states of tokens [b, s] from the stage before; None on the first."""
        rank = self._pp.rank
        if rank == 0:
            return None
        shape, dtype = self._model.hidden_shape(*tokens.shape), self._model.hidden_dtype
        return self._mailbox.receive(shape, dtype, rank - 1, f"from {rank - 1}").take()

    def _passed_on(self, out: Tensor) -> Tensor | None:
        """Returns the result of the last stage; that of another one is sent to the next."""
        rank = self._pp.rank
        if rank == self._pp.size - 1:
            return out
        self._mailbox.send(out, rank + 1, f"to {rank + 1}")
        return None

    def head(self, hidden: Tensor) -> Tensor:
        """Returns logits [s, b, padded vocab / tp] of hidden [s, b, h], on the last rank."""
        return self._model.head(hidden)

    def next_logits(self, hidden: Tensor | None, b: int) -> Tensor:
        """Returns the logits of the last position [b, padded vocab / tp] on every rank, from the result of `hidden`.

        Communication: one broadcast of the result over pp.
        """
        vocab = self._build.config.padded_vocab_size // self._build.groups.tp.size
        logits = None if hidden is None else self.head(hidden[-1:])[0]
        return self.share(logits, (b, vocab), self._build.dtype)

    def share(self, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the last rank's tensor on every rank. Communication: one broadcast over pp."""
        self._mailbox.flush()
        if tensor is None:
            tensor = torch.empty(shape, dtype=dtype, device=self._build.device)
        return broadcast(tensor.contiguous(), self._pp, self._pp.size - 1)
