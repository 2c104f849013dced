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
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron.config.activation_offload import RESIDENT_LAYERS, ActivationOffloadConfig
from megatron.config.recompute import RecomputeConfig
from megatron.planner.memory.parts import EndParts, LayerParts
from megatron.spec.memory.trace import RESIDUAL

Bytes = Mapping[str, Any]  # by kind
_NONE: Bytes = {}


class LayerMoves:
    """The bytes of one microbatch that leave the device, group by group, in one stage.

    away: bytes by kind for each group, one object for groups that are alike. held: the part of the first group that is
    the stage's input, whose memory is freed only at the end of the forward, because the callers of the stage hold it
    until then.
    """

    def __init__(self, away: Sequence[Bytes], residual: Any) -> None:
        """residual: bytes of the stage's input."""
        self.away = away
        first = away[0].get(RESIDUAL, 0) if away else 0
        self.held = min(residual, first) if isinstance(residual, int) else np.minimum(residual, first)

    @property
    def by_layer(self) -> tuple[Any, ...]:
        """Bytes of each group."""
        totals = {id(group): sum(group.values()) for group in {id(group): group for group in self.away}.values()}
        return tuple(totals[id(group)] for group in self.away)


def keeper(first: int) -> int:
    """Returns the place of the layer whose group holds the input of layers that backward recomputes together.

    first: the place of the first of these layers.
    """
    return max(0, first - 1)


def nothing_moves(layers: int) -> LayerMoves:
    """Returns the moves of a stage with so many layers without offload layer by layer."""
    return LayerMoves([_NONE] * layers, 0)


def layer_moves(
    offload: ActivationOffloadConfig,
    recompute: RecomputeConfig,
    layers: Sequence[LayerParts],
    ends: EndParts,
    *,
    embedding: bool,
    ratio: Any,
) -> LayerMoves:
    """Returns the bytes of a stage that leave the device layer by layer.

    layers: of the stage. embedding: it has the embedding. ratio: of --pipeline-offload-ratio; auto begins with 0.
    """
    count = len(layers)
    saved: list[list[Bytes]] = [[] for _ in range(count)]
    of_input, start = {RESIDUAL: ends.residual}, 0
    for group, again in recompute.groups(range(count)):
        if again:
            saved[keeper(start)].append(of_input)
        else:
            for place in group:
                saved[place].append(layers[place].saved)
        start += len(group)
    if count and embedding and offload.kind != "modules":
        saved[0].append(ends.embedded)
    moved = offload.cpu_offloading_num_layers if offload.kind == "layers" else max(0, count - RESIDENT_LAYERS)
    away, alike = [_NONE] * count, dict[Hashable, Bytes]()
    for place in range(min(moved, count)):
        share = ratio if offload.kind == "ratio" else layers[place].share
        key = id(share), *map(id, saved[place])
        if key not in alike:
            total = Counter[str]()
            for part in saved[place]:
                total.update(part)
            alike[key] = {kind: _part(share, size) for kind, size in total.items()}
        away[place] = alike[key]
    return LayerMoves(away, ends.residual)


def _part(share: Any, size: Any) -> Any:
    """A share of so many bytes: an integer if they are one."""
    return int(share * size) if isinstance(size, int) else share * size
