"""The memory of a prediction of a further token (core/transformer/prediction.py), event by event."""

from __future__ import annotations

import dataclasses

from megatron.spec.decoder import DecoderSpec, PredictionSpec
from megatron.spec.memory.embedding import EmbeddingMemory
from megatron.spec.memory.layer import LayerMemory, recomputed
from megatron.spec.memory.linear import LinearMemory
from megatron.spec.memory.norm import NormMemory
from megatron.spec.memory.trace import BACKWARD, NORMS, RESIDUAL, MemoryTrace, profile_of
from megatron.spec.sizes import Sizes


class PredictionMemory:
    """From the normed hidden states of the depth before to those of this depth.

    modules: parts of the layer that are computed again in backward; all of it if it is `whole`.
    """

    def __init__(
        self, decoder: DecoderSpec, spec: PredictionSpec, sizes: Sizes, modules: frozenset[str], *, whole: bool
    ) -> None:
        self._sizes = sizes = dataclasses.replace(sizes, fp8=None)
        self._embedding = EmbeddingMemory(dataclasses.replace(decoder.embedding, positions=None), sizes)
        self._embedding_norm = NormMemory(spec.embedding_norm, sizes)
        self._hidden_norm = NormMemory(spec.hidden_norm, dataclasses.replace(sizes, r=sizes.e))
        self._projection = LinearMemory(spec.projection, sizes, (NORMS, RESIDUAL))
        self._layer = LayerMemory(spec.layer, sizes, modules)
        self._final_norm = NormMemory(spec.final_norm, sizes)
        self._recomputed = recomputed(self._layer, profile_of(self._layer.forward), sizes) if whole else None

    def forward(self, trace: MemoryTrace) -> None:
        """Leaves the normed hidden states, and what backward needs."""
        sizes = self._sizes
        self._embedding.forward(trace)
        self._embedding_norm.forward(trace)
        self._hidden_norm.forward(trace)
        trace.take(NORMS, 2 * sizes.hidden)  # both of them as one tensor
        trace.free(NORMS, self._embedding_norm.out + self._hidden_norm.out)
        self._projection.forward(trace)
        if sizes.residual != sizes.hidden:
            trace.take(RESIDUAL, sizes.residual)
            trace.free(RESIDUAL, sizes.hidden)
        self._layer.forward(trace)
        if self._recomputed is not None:
            trace.replay(self._recomputed[0])
        self._final_norm.forward(trace)
        for norm in (self._embedding_norm, self._final_norm):
            trace.free(RESIDUAL, sizes.residual if norm.copies else 0)

    def backward(self, trace: MemoryTrace) -> None:
        """From the gradient of the normed hidden states to that of the depth before, which takes its place."""
        sizes = self._sizes
        self._final_norm.backward(trace)
        trace.free(RESIDUAL, 0 if self._final_norm.copies else sizes.residual)
        if self._recomputed is not None:
            trace.replay(self._recomputed[1][True])
            trace.free(RESIDUAL, sizes.residual)  # the second run ends before its output
        self._layer.backward(trace)
        if sizes.residual != sizes.hidden:
            trace.take(BACKWARD, sizes.hidden)
            trace.free(BACKWARD, sizes.residual)
        self._projection.backward(trace)
        trace.take(BACKWARD, sizes.hidden)  # both norms read parts of one gradient, which lives as long as they need it
        self._hidden_norm.backward(trace)
        self._embedding_norm.backward(trace)
        trace.free(BACKWARD, sizes.hidden)
        trace.free(RESIDUAL, 0 if self._embedding_norm.copies else sizes.residual)
        self._embedding.backward(trace)


def rotary_tables(decoder: DecoderSpec, sizes: Sizes) -> int:
    """Bytes of the rotary tables of a microbatch, and of the position channels of its keys."""
    channels = sum(rotary.channels // 2 * 2 for rotary in decoder.rotaries)
    return sizes.s * (channels + decoder.position_channels) * sizes.e
