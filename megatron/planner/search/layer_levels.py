"""The memory of layers, and of the two ends of the model, as sums of bytes, for many sizes of a microbatch together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.spec.decoder import DecoderSpec, LayerSpec
from megatron.spec.memory.embedding import EmbeddingMemory
from megatron.spec.memory.head import HeadMemory
from megatron.spec.memory.layer import LayerMemory
from megatron.spec.memory.prediction import rotary_tables
from megatron.spec.memory.trace import LevelTrace, MemoryTrace
from megatron.spec.sizes import Sizes

ManyBytes = NDArray[np.float64]


@dataclass(frozen=True)
class Levels:
    """Bytes of some work, whatever was in use before it: what it leaves behind, and the most at once. Each is [K]."""

    net: ManyBytes
    peak: ManyBytes

    def then(self, other: Levels) -> Levels:
        """Returns this work and then the other."""
        return Levels(self.net + other.net, np.maximum(self.peak, self.net + other.peak))

    def changed(self, nbytes: ManyBytes) -> Levels:
        """Returns this work after which so many more bytes are in use."""
        net = self.net + nbytes
        return Levels(net, np.maximum(self.peak, net))

    def times(self, number: int) -> Levels:
        """Returns this work so many times in turn."""
        if number == 1:
            return self
        return Levels(self.net * number, np.maximum(self.peak, self.net * (number - 1) + self.peak))


@dataclass(frozen=True)
class LayerLevels:
    """The levels of one kind of layers.

    again: the second forward, in backward. last: the backward of the last layer of a stage, whose gradient is a
    message. routing: bytes that stay where backward recomputes the layer.
    """

    forward: Levels
    again: Levels
    backward: Levels
    last: Levels
    routing: ManyBytes


@dataclass(frozen=True)
class EndLevels:
    """The levels of the embedding and the head.

    residual: bytes of the residual stream. rotary: of the rotary tables. embedded: what the embedding leaves besides
    the residual stream.
    """

    embedding: Levels
    embedding_backward: Levels
    head: Levels
    head_backward: Levels
    residual: ManyBytes
    rotary: ManyBytes
    embedded: ManyBytes


def layer_levels(layer: LayerSpec, sizes: Sequence[Sizes], modules: Sequence[frozenset[str]]) -> LayerLevels:
    """Returns the levels of one layer for K sizes, with the parts that backward computes again for each."""
    rows = []
    for one, again in zip(sizes, modules, strict=True):
        memory = LayerMemory(layer, one, again)
        forward = _trace(memory.forward)
        backward, last = (_trace(functools.partial(memory.backward, owned=owned)) for owned in (True, False))
        made_again = (forward.level - forward.routing, forward.peak - forward.routing_at_peak)
        rows.append((*_both(forward), *made_again, *_both(backward), *_both(last), forward.routing))
    columns = np.array(rows, np.float64).T
    forward_levels, second, backward_levels, of_last = _pairs(columns)
    return LayerLevels(forward_levels, second, backward_levels, of_last, columns[8])


def end_levels(spec: DecoderSpec, sizes: Sequence[Sizes], again: Sequence[tuple[frozenset[str], bool]]) -> EndLevels:
    """Returns the levels of the ends for K sizes. again: the parts of the layers of predictions that are recomputed,
    and whether whole layers are."""
    rows = []
    for one, (modules, whole) in zip(sizes, again, strict=True):
        embedding, head = EmbeddingMemory(spec.embedding, one), HeadMemory(spec, one, modules, whole=whole)
        first = _trace(embedding.forward)
        traces = (first, *map(_trace, (embedding.backward, head.forward, head.backward)))
        others = (one.residual, rotary_tables(spec, one), first.level - one.residual)
        rows.append((*(level for trace in traces for level in _both(trace)), *others))
    columns = np.array(rows, np.float64).T
    before, before_backward, after, after_backward = _pairs(columns)
    return EndLevels(before, before_backward, after, after_backward, columns[8], columns[9], columns[10])


def _trace(work: Callable[[MemoryTrace], None]) -> LevelTrace:
    trace = LevelTrace()
    work(trace)
    return trace


def _both(trace: LevelTrace) -> tuple[int, int]:
    return trace.level, trace.peak


def _pairs(columns: ManyBytes) -> list[Levels]:
    """The first four levels, each in two columns."""
    return [Levels(columns[place], columns[place + 1]) for place in range(0, 8, 2)]
