"""Activations that are offloaded layer by layer: which of them leave the device, and when they leave and return.

A group consists of the activations that one layer saves. The group of the first layer also holds those of the
embedding, and the group of the last layer those of the head. A group of layers that backward recomputes saves its input
before its first layer begins, so this input belongs to the group of the layer before. The offload of a group starts
when its layer has run. Its memory is freed when the next layer has run as well, or at the end of the forward for the
last group but one. In backward the first access to a group waits for its reload, and starts the reload of the group
before it (core/offload/activations.py).

The last group never leaves the device. With a ratio, and with parts of layers, the one before it stays as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from megatron.config.activation_offload import RESIDENT_LAYERS, ActivationOffloadConfig
from megatron.config.recompute import NORM, RecomputeConfig
from megatron.schedule.partition import Stage
from megatron.spec.memory.layer import LayerMemory
from megatron.spec.memory.trace import (
    ATTN_NORM,
    ATTN_PROJ,
    CORE_ATTN,
    MLP_ACT,
    MLP_FC1,
    MLP_FC2,
    MLP_NORM,
    POST_ATTN_NORM,
    POST_MLP_NORM,
    QKV_LINEAR,
    RESIDUAL,
    ROUTING,
    MemoryTrace,
)
from megatron.spec.sizes import Sizes

Bytes = Mapping[str, int]  # by kind


class LayerMoves:
    """The bytes of one microbatch that leave the device, group by group, in one stage.

    away: bytes by kind for each group. held: the part of the first group that is the stage's input, whose memory is
    freed only at the end of the forward, because the callers of the stage hold it until then.
    """

    def __init__(self, away: Sequence[Bytes], residual: int) -> None:
        """residual: bytes of the stage's input."""
        self.away = away
        self.held = min(residual, away[0].get(RESIDUAL, 0)) if away else 0


class Leaving:
    """Frees the memory of groups in a trace as they leave the device in a forward."""

    def __init__(self, trace: MemoryTrace, moves: LayerMoves) -> None:
        self._trace, self._moves, self._gone = trace, moves, 0

    def layer_begins(self, place: int) -> None:
        """Call before a layer runs, or before a group of layers that backward recomputes.

        place: of the layer, or of the group's first layer, in the stage.
        """
        self._leave(place - 1)

    def forward_ends(self) -> None:
        """Call at the end of the forward: all groups but the last one have left."""
        self._leave(len(self._moves.away) - 1)
        if self._gone:
            self._trace.free(RESIDUAL, self._moves.held)

    def _leave(self, stop: int) -> None:
        for place in range(self._gone, stop):
            for kind, size in self._moves.away[place].items():
                self._trace.free(kind, size)
            if place == 0:
                self._trace.take(RESIDUAL, self._moves.held)
        self._gone = max(self._gone, stop)


class Returning:
    """Takes the memory of groups in a trace as they return to the device in a backward."""

    def __init__(self, trace: MemoryTrace, moves: LayerMoves, returned: Collection[int] = ()) -> None:
        """returned: places whose groups are on the device."""
        self._trace, self._moves, self._back = trace, moves, set(returned)

    def asked(self, place: int) -> None:
        """Call when backward reads the group of the layer at this place."""
        for number in (place, place - 1):
            if number < 0 or number in self._back:
                continue
            self._back.add(number)
            for kind, size in self._moves.away[number].items():
                self._trace.take(kind, size)


def keeper(first: int) -> int:
    """Returns the place of the layer whose group holds the input of layers that backward recomputes together.

    first: the place of the first of these layers.
    """
    return max(0, first - 1)


def layer_moves(
    offload: ActivationOffloadConfig,
    recompute: RecomputeConfig,
    sizes: Sizes,
    stage: Stage,
    memories: Sequence[tuple[LayerMemory, Bytes]],
    embedding: Bytes,
) -> LayerMoves:
    """Returns the bytes of a stage that leave the device layer by layer.

    memories: of the stage's layers, with the bytes by kind that each leaves behind. embedding: the same bytes of the
    embedding's forward.
    """
    layers = len(memories)
    saved, start = [Counter[str]() for _ in range(layers)], 0
    for group, again in recompute.groups(stage.layers):
        if again:
            saved[keeper(start)][RESIDUAL] += sizes.residual
        else:
            for place in range(start, start + len(group)):
                saved[place].update({kind: size for kind, size in memories[place][1].items() if kind != ROUTING})
        start += len(group)
    if layers and stage.embedding and offload.kind != "modules":
        saved[0].update({kind: size for kind, size in embedding.items() if kind != RESIDUAL})
    moved, shares = max(0, layers - RESIDENT_LAYERS), [0.0] * layers
    if offload.kind == "layers":
        moved, shares = min(offload.cpu_offloading_num_layers, layers), [1.0] * layers
    elif offload.kind == "ratio":
        shares = [offload.ratio or 0.0] * layers  # auto begins with 0
    elif offload.kind == "modules":
        shares = [_share_of_parts(offload, recompute.modules, memory) for memory, _ in memories]
    away = [
        {kind: int(share * size) for kind, size in group.items()}
        for share, group in zip(shares[:moved], saved[:moved], strict=True)
    ]
    return LayerMoves([*away, *({} for _ in range(layers - moved))], sizes.residual)


def _share_of_parts(offload: ActivationOffloadConfig, again: frozenset[str], layer: LayerMemory) -> float:
    """The share of the bytes that a layer saves. A storage moves with any part that saves it; a linear layer saves the
    input of the norm or activation that it computes again."""
    parts = {part: size for part, size in layer.kept_by_part().items() if part != ROUTING}
    named = set(offload.offload_modules or ())
    for part, behind in ((ATTN_NORM, POST_ATTN_NORM), (MLP_NORM, POST_MLP_NORM)):
        if part in named:
            named.add(behind)
    for name, part, linear in (
        (NORM, ATTN_NORM, QKV_LINEAR),
        (NORM, MLP_NORM, MLP_FC1),
        (MLP_ACT, MLP_ACT, MLP_FC2),
    ):
        if name in again and linear in named:
            named.add(part)
    if CORE_ATTN in named and layer.core_saves_output:
        named.add(ATTN_PROJ)  # its input is the output that a fused kernel saves
    return sum(parts[name] for name in named) / sum(parts.values())
