"""Layers with a gated delta net instead of attention, and attention with an output gate: Qwen3-Next and Qwen3.5.

A gated delta net (Yang, Kautz and Hatamizadeh, arXiv 2412.06464) reads the sequence into a state of fixed size. That of
Kimi Linear (arXiv 2510.26692) has a decay for each channel of a key.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import Need, flag
from megatron.config.interval import SIZE
from megatron.config.layers import every_layer

_DELTA = Need(
    lambda run: run.model.experimental_attention_variant is not None,
    "all layers have attention",
    "give --experimental-attention-variant gdn",
)
KDA = "kda"  # Kimi delta attention


@dataclass(frozen=True, kw_only=True)
class DeltaNetModel:
    """Fields of ModelConfig. A delta net has key heads, each of which serves as many value heads as the others."""

    experimental_attention_variant: str | None = flag(
        None,
        "layers with a gated delta net (gdn; its older name is gated_delta_net), or with that of Kimi Linear (kda), "
        "which --linear-attention-freq chooses; default: all layers have attention",
        choices=("gdn", "gated_delta_net", KDA),
    )
    linear_attention_freq: str | None = flag(
        None,
        "layers with a gated delta net: a number N for all but every N-th layer, or a list with one number per layer, 1 "
        "for a delta net and 0 for attention, such as [1,1,1,0] or ([1]*3+[0])*4",
        metavar="PATTERN",
        needs=_DELTA,
    )
    linear_conv_kernel_dim: int = flag(
        4, "tokens, its own included, from which the convolution of a delta net computes one", within=SIZE, needs=_DELTA
    )
    linear_key_head_dim: int = flag(128, "channels of a query and of a key of a delta net", within=SIZE, needs=_DELTA)
    linear_value_head_dim: int = flag(128, "channels of a value of a delta net", within=SIZE, needs=_DELTA)
    linear_num_key_heads: int = flag(16, "heads of queries and keys of a delta net", within=SIZE, needs=_DELTA)
    linear_num_value_heads: int = flag(32, "heads of values of a delta net", within=SIZE, needs=_DELTA)
    attention_output_gate: bool = flag(
        False, "multiply the output of attention by the sigmoid of a gate, which is projected with the queries"
    )

    @property
    def has_delta_net(self) -> bool:
        """Whether some layers have a gated delta net."""
        return self.experimental_attention_variant is not None

    @property
    def delta_net_form(self) -> str | None:
        """The form of the delta nets under its present name; None without them."""
        variant = self.experimental_attention_variant
        return "gdn" if variant == "gated_delta_net" else variant

    @property
    def decays_by_channel(self) -> bool:
        """Whether each channel of a key has a decay, as in Kimi delta attention, and not each value head."""
        return self.experimental_attention_variant == KDA

    def delta_layers_of(self, num_layers: int) -> tuple[bool, ...]:
        """Returns whether each layer has a gated delta net. Raises ConfigError for a pattern that does not fit."""
        if not self.has_delta_net or self.linear_attention_freq is None:
            return (False,) * num_layers
        pattern = every_layer("--linear-attention-freq", self.linear_attention_freq, num_layers, nth=0)
        return tuple(bool(has_delta_net) for has_delta_net in pattern)
