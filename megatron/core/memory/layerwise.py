"""Offload by layer: where a layer begins, and the policy that moves the first ones whole.

The second half of Transformer Engine's CPU offload, in its terms: N of a stage's L layers leave, L - N stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import nn

from megatron.core.memory.activation_offload import ActivationOffload


class FirstLayers:
    """All that the first so many layers of a stage save. N = L - 2 needs as little memory as N = L - 1, and copies less."""

    whole = 0.0

    def __init__(self, number: int) -> None:
        self._number = number

    def share(self, stage: int, layer: int, layers: int) -> float:
        """See Policy."""
        return 1.0 if layer < self._number else 0.0

    def takes(self) -> bool:
        """See Policy."""
        return True


class ChosenLayers:
    """All that certain layers save."""

    whole = 0.0

    def __init__(self, places: Mapping[int, Collection[int]]) -> None:
        """Stage -> places of the layers among its own."""
        self._places = places

    def share(self, stage: int, layer: int, layers: int) -> float:
        """See Policy."""
        return 1.0 if layer in self._places.get(stage, ()) else 0.0

    def takes(self) -> bool:
        """See Policy."""
        return True


def mark_layers(offload: ActivationOffload, layers: Iterable[nn.Module]) -> None:
    """Tell `offload` where each layer begins. Hooks of modules: a layer knows nothing of it."""
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: offload.next_layer())
