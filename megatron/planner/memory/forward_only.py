"""The memory of a forward without gradients: of a stage that answers prompts, or computes log-probabilities.

The events are those of the training forward (spec/memory). Nothing is kept for a backward: what attention or the MLP has
made is free when it ends, except for its output and the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from megatron.schedule.partition import Stage
from megatron.spec.decoder import DecoderSpec, LayerSpec
from megatron.spec.memory.embedding import EmbeddingMemory
from megatron.spec.memory.head import HeadMemory
from megatron.spec.memory.layer import LayerMemory
from megatron.spec.memory.norm import NormMemory
from megatron.spec.memory.prediction import rotary_tables
from megatron.spec.memory.trace import (
    ATTENTION,
    COMMUNICATION,
    MLP,
    NORMS,
    RESIDUAL,
    ROUTING,
    WORK,
    MemoryTrace,
    Profile,
    profile_of,
)
from megatron.spec.sizes import Sizes

NO_MODULES: frozenset[str] = frozenset()  # nothing is computed again
_BRANCHES = ("attention", "mlp")
_OF_BRANCH = (ATTENTION, MLP, NORMS, ROUTING)


class ForwardTrace(MemoryTrace):
    """A trace of a layer's forward that no backward follows."""

    def doing(self, name: str) -> AbstractContextManager[None]:
        """See MemoryTrace. Tensors of a branch of the layer are free at its end."""
        named = super().doing(name)
        return self._branch(named) if name in _BRANCHES else named

    @contextmanager
    def _branch(self, named: AbstractContextManager[None]) -> Iterator[None]:
        with named:
            yield
        for kind in _OF_BRANCH:
            self.free(kind, self.now[kind])


def forward_of_layer(layer: LayerSpec, sizes: Sizes) -> Profile:
    """Returns the peak of a layer whose input is in use."""
    trace = ForwardTrace()
    LayerMemory(layer, sizes, NO_MODULES).forward(trace)
    return Profile({}, dict(trace.top), trace.moment, {})


def forward_of_stage(
    spec: DecoderSpec,
    stage: Stage,
    sizes: Sizes,
    head: Callable[[MemoryTrace], None],
    around: Callable[[LayerSpec], int] = lambda layer: 0,
) -> Profile:
    """Returns the peak of a stage's forward.

    head: reports the events behind the final norm. around: bytes of work space in use while a layer runs, besides its
    own.
    """
    trace = MemoryTrace()
    trace.take(ATTENTION, rotary_tables(spec, sizes))
    if stage.embedding:
        with trace.doing("embedding"):
            trace.replay(peak_of(EmbeddingMemory(spec.embedding, sizes).forward))
    trace.take(RESIDUAL, sizes.residual)
    for number, layer in {id(spec.layers[n]): (n, spec.layers[n]) for n in reversed(stage.layers)}.values():
        trace.take(WORK, around(layer))
        with trace.doing(f"layer {number}"):
            trace.replay(forward_of_layer(layer, sizes))
        trace.free(WORK, around(layer))
    if stage.head:
        with trace.doing("head"):
            NormMemory(spec.final_norm, sizes).forward(trace)
            head(trace)
    else:
        trace.free(RESIDUAL, sizes.residual)
        trace.use(COMMUNICATION, sizes.residual)
    return Profile({}, dict(trace.top), trace.moment, {})


def log_probabilities_of_stage(spec: DecoderSpec, stage: Stage, sizes: Sizes) -> Profile:
    """Returns the peak of the forward that computes the log-probabilities of a microbatch's labels."""
    return forward_of_stage(spec, stage, sizes, HeadMemory(spec, sizes, NO_MODULES, whole=False).losses)


def peak_of(work: Callable[[MemoryTrace], None]) -> Profile:
    """Returns the peak of some work, as a profile that leaves nothing."""
    profile = profile_of(work)
    return Profile({}, profile.top, profile.moment, {})
