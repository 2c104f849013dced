"""Offload by module: of every layer but the last two, what the named parts of it save.

The names are Megatron-LM's (--offload-modules). A part lasts from the beginning of one module's forward to the beginning or
the end of another's, so attention between its projections, and the activation between the MLP's, are parts too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from megatron.config.activation_offload import RESIDENT_LAYERS

# part -> (module of a layer, what begins behind it)
_PARTS = {
    "attn_norm": ("input_layernorm", None),
    "qkv_linear": ("self_attention.linear_qkv", "core_attn"),
    "attn_proj": ("self_attention.linear_proj", None),
    "mlp_norm": ("pre_mlp_layernorm", None),
    "mlp_fc1": ("mlp.linear_fc1", "mlp_act"),
    "mlp_fc2": ("mlp.linear_fc2", None),
}


class ByModules:
    """What is saved while a part of a layer runs that was asked for."""

    whole = 0.0

    def __init__(self, parts: Collection[str]) -> None:
        self._parts = frozenset(parts)
        self._part: str | None = None

    def share(self, stage: int, layer: int, layers: int) -> float:
        """See Policy."""
        return 1.0 if layer < layers - RESIDENT_LAYERS else 0.0

    def takes(self) -> bool:
        """See Policy."""
        return self._part in self._parts

    def mark(self, layers: Iterable[nn.Module]) -> None:
        """Follow which part runs, by hooks of the layers' modules."""
        for layer in layers:
            for part, (path, then) in _PARTS.items():
                module = layer.get_submodule(path)
                module.register_forward_pre_hook(lambda *_, part=part: self._enter(part))
                module.register_forward_hook(lambda *_, then=then: self._enter(then))

    def _enter(self, part: str | None) -> None:
        self._part = part
