"""Which saved activations are offloaded: a share of all, certain layers, or certain modules of layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from torch import nn

from megatron.config.activation_offload import RESIDENT_LAYERS

# Module of a layer, if the layer has it -> (the part of the layer that its forward begins, the part that begins when
# that forward ends). The names of the parts are those of Megatron-LM's --offload-modules.
_PARTS = {
    "input_layernorm": ("attn_norm", None),
    "self_attention.linear_qkv": ("qkv_linear", "core_attn"),
    "self_attention.linear_proj": ("attn_proj", None),
    "self_attention.in_proj": ("qkv_linear", "core_attn"),
    "self_attention.out_proj": ("attn_proj", None),
    "post_self_attn_layernorm": ("attn_norm", None),
    "pre_mlp_layernorm": ("mlp_norm", None),
    "mlp.linear_fc1": ("mlp_fc1", "mlp_act"),
    "mlp.linear_fc2": ("mlp_fc2", None),
    "post_mlp_layernorm": ("mlp_norm", None),
}


class OffloadPolicy(Protocol):
    """Decides which tensors ActivationOffload offloads."""

    @property
    def schedule_ratio(self) -> float:
        """Share of a microbatch's activations that one OFFLOAD action of the pipeline schedule offloads; 0: no such
        actions."""
        ...

    def layer_ratio(self, stage: int, layer: int, num_layers: int) -> float:
        """Share of a layer's offloadable bytes to offload. `layer`: index among the `num_layers` layers of its
        stage."""
        ...

    def is_offloadable(self) -> bool:
        """Whether a tensor that is saved now may be offloaded."""
        ...


class ByRatio:
    """Offloads a share of the bytes that each layer or microbatch saves."""

    def __init__(self, ratio: float) -> None:
        self.schedule_ratio = ratio

    def layer_ratio(self, stage: int, layer: int, num_layers: int) -> float:
        """See OffloadPolicy."""
        return self.schedule_ratio if layer < num_layers - RESIDENT_LAYERS else 0.0

    def is_offloadable(self) -> bool:
        """See OffloadPolicy."""
        return True


class ChosenLayers:
    """Offloads everything that certain layers save.

    This is the activation half of Transformer Engine's CPU offload, which takes the first N of a stage's L layers.
    N = L - 2 needs as little memory as N = L - 1, and copies less.
    """

    schedule_ratio = 0.0

    def __init__(self, layers: Mapping[int, Collection[int]]) -> None:
        """Stage -> indices of its offloaded layers among all layers of the stage."""
        self._layers = layers

    def layer_ratio(self, stage: int, layer: int, num_layers: int) -> float:
        """See OffloadPolicy."""
        return 1.0 if layer in self._layers.get(stage, ()) else 0.0

    def is_offloadable(self) -> bool:
        """See OffloadPolicy."""
        return True


class ByModules:
    """Offloads tensors that are saved while certain parts of a layer run, in all layers but the last two.

    A part lasts from the beginning of one module's forward to the beginning or the end of another's. So attention
    between its two projections and the activation between the MLP's are parts, too.
    """

    schedule_ratio = 0.0

    def __init__(self, parts: Collection[str]) -> None:
        self._parts = frozenset(parts)
        self._current: str | None = None

    def layer_ratio(self, stage: int, layer: int, num_layers: int) -> float:
        """See OffloadPolicy."""
        return 1.0 if layer < num_layers - RESIDENT_LAYERS else 0.0

    def is_offloadable(self) -> bool:
        """See OffloadPolicy."""
        return self._current in self._parts

    def attach(self, layers: Iterable[nn.Module]) -> None:
        """Register hooks on the layers' modules that track which part runs."""
        for layer in layers:
            modules = dict(layer.named_modules())
            for path in _PARTS.keys() & modules.keys():
                part, following = _PARTS[path]
                modules[path].register_forward_pre_hook(lambda *_, part=part: self._enter(part))
                modules[path].register_forward_hook(lambda *_, following=following: self._enter(following))

    def _enter(self, part: str | None) -> None:
        self._current = part
