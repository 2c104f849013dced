"""The memory of a pipeline stage in the forward and the backward of one microbatch."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.recompute import RecomputeConfig
from megatron.planner.memory.layer_moves import LayerMoves, Leaving, Returning, keeper, layer_moves
from megatron.planner.memory.offloaded_weights import OffloadedBuckets
from megatron.schedule.partition import Stage
from megatron.schedule.schedule import Kind
from megatron.spec.decoder import DecoderSpec, LayerSpec
from megatron.spec.memory.embedding import EmbeddingMemory
from megatron.spec.memory.head import HeadMemory
from megatron.spec.memory.layer import LayerMemory, recomputed
from megatron.spec.memory.prediction import rotary_tables
from megatron.spec.memory.trace import (
    ACTIVATIONS,
    ATTENTION,
    BACKWARD,
    COMMUNICATION,
    RESIDUAL,
    WORK,
    MemoryTrace,
    Profile,
    profile_of,
)
from megatron.spec.moe import MoESpec
from megatron.spec.sizes import Sizes

NONE_OFFLOADED = OffloadedBuckets()
_NOTHING = Profile({}, {}, "", {})


@dataclass(frozen=True)
class StageMemory:
    """One profile per kind of computation of a schedule. Tensors that pass between stages count as communication.

    head: the first part of the backward of a stage with the head, before which no gradient of the stage is complete;
    nothing in other stages. backward: the rest of it. weight_grad: the second half of a backward that the schedule
    splits, None if it does not. by_layer: bytes of each layer's group that are offloaded layer by layer.
    """

    forward: Profile
    head: Profile
    backward: Profile
    weight_grad: Profile | None
    by_layer: tuple[int, ...]

    @property
    def offloaded(self) -> int:
        """Bytes that have been offloaded layer by layer when the forward ends."""
        return sum(self.by_layer)

    def of(self, kind: Kind) -> tuple[Profile, Profile]:
        """Returns the profiles of a computation: of the part that completes no gradient, and of the rest."""
        if kind is Kind.FORWARD:
            return self.forward, _NOTHING
        if kind is Kind.WEIGHT_GRAD:
            assert self.weight_grad is not None
            return _NOTHING, self.weight_grad
        return self.head, self.backward


def stage_memory(
    spec: DecoderSpec,
    sizes: Sizes,
    stage: Stage,
    recompute: RecomputeConfig,
    offload: ActivationOffloadConfig,
    offloaded: OffloadedBuckets = NONE_OFFLOADED,
    *,
    by_layer: bool = True,
    profiles: LayerProfiles | None = None,
) -> StageMemory:
    """Returns the memory of one stage of the decoder.

    profiles: those of this decoder, these sizes and this recompute, where several stages share them. offloaded: the
    buckets of the stage's weights that live in host memory. by_layer: the activations that the flags offload leave the
    device layer by layer; if it is False, the schedule offloads them, and these profiles do not include it.
    """
    profiles = profiles or LayerProfiles(spec, sizes, recompute.modules)
    events = _StageEvents(spec, sizes, stage, recompute, offload, offloaded, profiles, by_layer=by_layer)
    head = profile_of(events.head_backward) if stage.head else _NOTHING
    forward, backward = profile_of(events.forward), profile_of(events.backward)
    moved = _moved(events)
    if not sizes.split_backward:
        return StageMemory(forward, head, backward, None, moved)
    nets = [profile.net for profile in (forward, head, backward)]
    used = set().union(*nets) - {COMMUNICATION}
    left = {kind: -sum(net.get(kind, 0) for net in nets) for kind in used}
    weight_grad = Profile(left, _grad_work(spec, sizes, stage), "weight gradients", {})
    return StageMemory(forward, head, backward, weight_grad, moved)


def _grad_work(spec: DecoderSpec, sizes: Sizes, stage: Stage) -> dict[str, int]:
    """The work space of a stage's largest weight gradient, if it is rounded to bf16: before its operands are freed."""
    if not sizes.rounds_grads:
        return {}
    layers = [spec.layers[number] for number in stage.layers]
    elements = [math.prod(linear.local_features(sizes.tp)) for layer in layers for linear in layer.linears().values()]
    if stage.head:
        elements.append(math.prod(spec.output.local_features(sizes.tp)))
    if sizes.load is not None:
        experts = [layer.mlp.experts for layer in layers if isinstance(layer.mlp, MoESpec)]
        for spec_of_experts in experts:
            numel = spec_of_experts.hidden * spec_of_experts.width * (2 if spec_of_experts.gated else 1)
            elements.append(sizes.load.experts * (numel // sizes.load.etp))
    largest = max(elements, default=0)
    return {WORK: sizes.grad_sum(largest) + sizes.grad_bits(largest)}


@dataclass(frozen=True)
class SavedActivations:
    """nbytes: activations that the forward of a stage leaves for its backward, if none leave the device. by_layer: as
    `StageMemory.by_layer`."""

    nbytes: int
    by_layer: tuple[int, ...]


def saved_activations(
    spec: DecoderSpec,
    sizes: Sizes,
    stage: Stage,
    recompute: RecomputeConfig,
    offload: ActivationOffloadConfig,
    profiles: LayerProfiles,
) -> SavedActivations:
    """Returns what `stage_memory` says about a stage's activations, without its backward. Arguments as there."""
    by_layer, whole = (
        _StageEvents(spec, sizes, stage, recompute, offload, NONE_OFFLOADED, profiles, by_layer=moves)
        for moves in (True, False)
    )
    net = profile_of(whole.forward).net
    return SavedActivations(sum(net.get(kind, 0) for kind in ACTIVATIONS), _moved(by_layer))


def _moved(events: _StageEvents) -> tuple[int, ...]:
    """Bytes of each layer's group that leave the device layer by layer."""
    return tuple(sum(group.values()) for group in events.moves.away)


@dataclass(frozen=True)
class _OneLayer:
    """The memory of a layer, and its profiles.

    backward: by whether the layer alone holds the gradient of its output. forget, again: see `recomputed`.
    """

    memory: LayerMemory
    forward: Profile
    backward: dict[bool, Profile]
    forget: Profile
    again: dict[bool, Profile]


class LayerProfiles:
    """The profiles of a decoder's layers, each made once for all layers that are alike. modules: computed again."""

    def __init__(self, spec: DecoderSpec, sizes: Sizes, modules: frozenset[str]) -> None:
        self._spec, self._sizes, self._modules = spec, sizes, modules
        self._made: dict[tuple[int, bool], _OneLayer] = {}

    def of(self, number: int) -> _OneLayer:
        """Returns those of a layer."""
        # Most layers are alike, and alike layers are one object. (They would compare equal with another dropout, too.)
        sizes = self._sizes.of_layer(number)
        kind = (id(self._spec.layers[number]), sizes.fp8 is None)
        if kind not in self._made:
            self._made[kind] = _profiles(self._spec.layers[number], sizes, self._modules)
        return self._made[kind]


def _profiles(layer: LayerSpec, sizes: Sizes, modules: frozenset[str]) -> _OneLayer:
    memory = LayerMemory(layer, sizes, modules)
    forward = profile_of(memory.forward)
    backward = {owned: profile_of(functools.partial(memory.backward, owned=owned)) for owned in (True, False)}
    return _OneLayer(memory, forward, backward, *recomputed(memory, forward, sizes))


class _StageEvents:
    """Reports what the forward and the backward of one microbatch take and free in a stage, in the order of the run.

    Arguments as for `stage_memory`.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        sizes: Sizes,
        stage: Stage,
        recompute: RecomputeConfig,
        offload: ActivationOffloadConfig,
        offloaded: OffloadedBuckets,
        profiles: LayerProfiles,
        *,
        by_layer: bool,
    ) -> None:
        self._sizes, self._stage, self._offloaded = sizes, stage, offloaded
        self._layers = {number: profiles.of(number) for number in stage.layers}
        self._place = {number: place for place, number in enumerate(stage.layers)}
        self._groups = recompute.groups(stage.layers)
        self._embedding = EmbeddingMemory(spec.embedding, sizes)
        self._head = HeadMemory(spec, sizes, recompute.modules, whole=recompute.is_full)
        self._rotary = rotary_tables(spec, sizes)
        # The engine holds the stage's input until the backward ends. Activation offload leaves it without its memory.
        self._held_input = sizes.residual if offload.kind is None else 0
        self.moves = LayerMoves([{}] * len(stage.layers), 0)
        if by_layer and offload.kind is not None:
            layers = [(self._layers[number].memory, self._layers[number].forward.net) for number in stage.layers]
            embedding = profile_of(self._embedding.forward).net
            self.moves = layer_moves(offload, recompute, sizes, stage, layers, embedding)

    def forward(self, trace: MemoryTrace) -> None:
        """Reports the forward."""
        self._begin_forward(trace)
        leaving = Leaving(trace, self.moves)
        for layers, again in self._groups:
            if again:
                self._forward_to_recompute(trace, layers, leaving)
            else:
                self._forward_layers(trace, layers, leaving)
        self._end_forward(trace)
        leaving.forward_ends()
        if not self._stage.layers:
            trace.free(ATTENTION, self._rotary)

    def head_backward(self, trace: MemoryTrace) -> None:
        """Reports the backward of the head, with which that of its stage begins."""
        Returning(trace, self.moves).asked(len(self._stage.layers) - 1)
        with trace.doing("head"):
            self._head.backward(trace)

    def backward(self, trace: MemoryTrace) -> None:
        """Reports the backward, or the first half of a split one, behind the head."""
        last = len(self._stage.layers) - 1
        returning = Returning(trace, self.moves, {last, last - 1} if self._stage.head else set())
        if not self._stage.head and not self._stage.layers:
            trace.take(BACKWARD, self._sizes.residual)
        for layers, again in reversed(self._groups):
            if again:
                self._backward_recomputed(trace, layers, returning)
            else:
                self._backward_layers(trace, layers, returning)
        if self._stage.layers:
            trace.free(ATTENTION, self._rotary)
        self._end_backward(trace)

    def _begin_forward(self, trace: MemoryTrace) -> None:
        """The input is embedded, or has been received."""
        if not self._stage.embedding:
            trace.free(COMMUNICATION, self._sizes.residual)
            trace.take(RESIDUAL, self._sizes.residual)
        trace.take(ATTENTION, self._rotary)
        if self._stage.embedding:
            with trace.doing("embedding"):
                self._embedding.forward(trace)

    def _forward_layers(self, trace: MemoryTrace, layers: Sequence[int], leaving: Leaving) -> None:
        for number in layers:
            leaving.layer_begins(self._place[number])
            with trace.doing(f"layer {number}"), self._with_weights(trace, [number]):
                trace.replay(self._layers[number].forward)

    def _forward_to_recompute(self, trace: MemoryTrace, layers: Sequence[int], leaving: Leaving) -> None:
        """A group of layers that backward recomputes keeps only its input and its output."""
        leaving.layer_begins(self._place[layers[0]])
        for number in layers:
            with trace.doing(f"layer {number}"), self._with_weights(trace, [number]):
                trace.replay(self._layers[number].forward)
            trace.replay(self._layers[number].forget)
        trace.free(RESIDUAL, self._sizes.residual * (len(layers) - 1))

    def _end_forward(self, trace: MemoryTrace) -> None:
        """The loss is computed, or the output is about to be sent."""
        if self._stage.head:
            with trace.doing("head"):
                self._head.forward(trace)
        else:
            trace.free(RESIDUAL, self._sizes.residual)
            trace.take(COMMUNICATION, self._sizes.residual)

    def _backward_layers(self, trace: MemoryTrace, layers: Sequence[int], returning: Returning) -> None:
        for number in reversed(layers):
            returning.asked(self._place[number])
            with trace.doing(f"layer {number}"), self._with_weights(trace, [number]):
                trace.replay(self._backward_profile(number))

    def _backward_recomputed(self, trace: MemoryTrace, layers: Sequence[int], returning: Returning) -> None:
        """A group of layers runs forward again, and then backward."""
        with self._with_weights(trace, layers, again=True):
            returning.asked(keeper(self._place[layers[0]]))
            for number in layers:
                with trace.doing(f"layer {number} again"):
                    trace.replay(self._layers[number].again[number == layers[-1]])
            trace.free(RESIDUAL, self._sizes.residual)  # the second run ends before its output
            for number in reversed(layers):
                with trace.doing(f"layer {number}"):
                    trace.replay(self._backward_profile(number))

    def _backward_profile(self, number: int) -> Profile:
        """A layer alone holds the gradient of its output, unless that is the message that another stage has sent."""
        return self._layers[number].backward[self._stage.head or number != self._stage.layers[-1]]

    def _end_backward(self, trace: MemoryTrace) -> None:
        """The embedding's backward runs, or the gradient of the input is about to be sent."""
        if self._stage.embedding:
            with trace.doing("embedding"):
                self._embedding.backward(trace)
        else:
            trace.use(COMMUNICATION, self._held_input)
            trace.free(BACKWARD, self._sizes.residual)
            trace.take(COMMUNICATION, self._sizes.residual)
        if not self._stage.head:
            trace.free(COMMUNICATION, self._sizes.residual)  # the gradient that was received

    @contextmanager
    def _with_weights(self, trace: MemoryTrace, layers: Collection[int], *, again: bool = False) -> Iterator[None]:
        """The offloaded weights of these layers are on the device during the body."""
        fetched = self._offloaded.fetched(layers, again=again)
        trace.take(COMMUNICATION, fetched)
        yield
        trace.free(COMMUNICATION, fetched)
