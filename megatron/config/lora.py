"""The projections named by --lora-target-modules: PEFT's names, and names of fused layers for all of their projections."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.base.errors import ConfigError

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_SEVERAL = {
    "all-linear": PROJECTIONS,
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
LORA_TARGETS = (*PROJECTIONS, *_SEVERAL)


def lora_projections(names: Sequence[str], *, gated: bool) -> tuple[str, ...]:
    """Returns the projections with an adapter, in the order of a layer. `gated`: the MLP has a gate. Raises
    ConfigError.
    """
    requested = {projection for name in names for projection in _SEVERAL.get(name, (name,))}
    if not gated:
        if "gate_proj" in names:
            raise ConfigError(
                "--lora-target-modules gate_proj: this MLP has no gate; remove it, or add --swiglu or --geglu"
            )
        requested.discard("gate_proj")
    return tuple(projection for projection in PROJECTIONS if projection in requested)
