"""A model family as data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.stored import StoredTensors

# Norms of a pre-norm layer, our name -> theirs.
PRE_NORMS: dict[str, str] = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}
# The router and the tensors of all experts in transformers' modules.
IN_MEMORY: dict[str, Any] = {
    "block": "mlp",
    "router": "gate",
    "stacked": ("experts.gate_up_proj", "experts.down_proj"),
}
NO_FIELD = ""
SILU, GELU_TANH, SQUARED_RELU, XIELU = "silu", "gelu_pytorch_tanh", "relu2", "xielu"


@dataclass(frozen=True)
class ExpertNames:
    """Names in a layer with experts, as on the hub: one tensor per expert and projection.

    block: the module that holds router and experts. projections: gate, up and down of an expert. stacked: in the block,
    the tensors of gates and ups and of downs of all experts, in a family that has no others. biases: likewise, of experts
    with biases; gates and ups then have a dim of their own in all of these. shared: the shared experts, in the layer.
    choice_bias: the bias of the choice, in the block. router: in the block. The gate of the shared experts is
    `shared_expert_gate` in all families. in_memory: the names that differ in transformers' modules,
    block, router and stacked among them.
    """

    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "mlp.shared_expert"
    choice_bias: str = "gate.e_score_correction_bias"
    router: str = "gate"
    stacked: tuple[str, str] | None = None
    biases: tuple[str, str] | None = None
    in_memory: Mapping[str, Any] = field(default_factory=lambda: IN_MEMORY)

    @property
    def of_modules(self) -> ExpertNames:
        """The names that transformers has in memory."""
        return dataclasses.replace(self, **self.in_memory)


@dataclass(frozen=True)
class Family:
    """`read`: config.json -> fields of ModelConfig. `write`: the fields that only this family's config.json has.

    groups, head_dim, theta, local_theta, percent, original, epsilon, std, width, tied, context: num_key_value_heads,
    head_dim, rope_theta, rope_local_base_freq, partial_rotary_factor, original_max_position_embeddings, rms_norm_eps,
    initializer_range, intermediate_size, tie_word_embeddings and max_position_embeddings of a config.json without these
    fields. None: one group for each head; hidden / heads; one rotary embedding for all layers; heads that are always
    rotated whole; no LongRoPE; an intermediate_size, or max_position_embeddings, must be there. A width of 0 is that of
    --ffn-hidden-size by default.

    activation: the only hidden_act; spellings: others that the reader takes. gated: the MLP has a gate. fields: a field
    that most families have -> its name in this one, or NO_FIELD. norms: our norm in a layer -> theirs. parallel_norms:
    likewise where attention and MLP are parallel, behind a norm for each of the two. fused: our linear layer in a layer
    -> the one tensor that holds all its projections, one after the other. by_group: that of queries, keys and values
    holds them group by group. blocks: or in as many blocks of heads, in each the queries, then the values, then the
    keys. joined: their tensor -> the projections of a delta net that it holds. rope_of_images: fields of
    rope_parameters that text does not depend on. swaps_halves: queries and keys are rotated the other way round, which
    is ours with the halves of each head swapped. scales_queries: queries are scaled by their position, as its YaRN
    says. scales_by_alpha: alpha in the rotary embedding of type "dynamic" scales the base, whatever the length.
    experts: None in a family of dense models. predicts: its folders may hold layers that predict further tokens.
    carried: a pattern of the names of tensors that are not trained and are written back as they were. sizes: fields
    that the text_config of a model with images may lack, with their values there. stored: how files have the tensors.
    older: an older name of a field -> its name. constants: tensors of one number in every layer that transformers reads
    and nobody trains, with the only values that are supported.
    """

    model_type: str
    architecture: str
    read: Callable[[JsonFields, dict[str, Any]], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]] | None
    groups: int | None = None
    theta: float = 10000.0
    percent: float | None = None
    original: int | None = None
    epsilon: float = 1e-6
    std: float = 0.02
    width: int | None = None
    tied: bool = False
    context: int | None = None
    head_dim: int | None = None
    local_theta: float | None = None
    activation: str = SILU
    spellings: tuple[str, ...] = ()
    gated: bool = True
    fields: Mapping[str, str] = field(default_factory=dict)
    norms: Mapping[str, str] = field(default_factory=lambda: PRE_NORMS)
    parallel_norms: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rope_of_images: frozenset[str] = frozenset()
    swaps_halves: bool = False
    scales_queries: bool = False
    scales_by_alpha: bool = False
    by_group: bool = False
    blocks: int | None = None
    experts: ExpertNames | None = None
    predicts: bool = False
    carried: re.Pattern[str] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    stored: StoredTensors = field(default_factory=StoredTensors)
    older: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)

    @property
    def has_adapters(self) -> bool:
        """Whether PEFT's adapters of its modules are read and written: these have the usual names, and hold projections
        one after the other."""
        module = "model.layers.0.self_attn."
        return self.stored.in_file(module) == module and not self.by_group and not self.swaps_halves

    @property
    def has_sites(self) -> bool:
        """Whether transformers' modules of it can be compared with ours one by one: those whose tensors are as most
        families have them, with shared experts in the block of the others."""
        names = None if self.experts is None else self.experts.of_modules
        apart = names is not None and not names.shared.startswith(f"{names.block}.")
        return self.stored == StoredTensors() and not self.swaps_halves and not apart

    def constants_of(self, layers: int) -> dict[str, float]:
        """Returns the constants of so many layers, by the names in a folder."""
        numbers = self.constants.items()
        return {f"model.layers.{layer}.{name}": value for layer in range(layers) for name, value in numbers}

    def carried_among(self, names: Iterable[str]) -> list[str]:
        """Returns the names of tensors that are carried, in their order."""
        return [name for name in names if self.carried is not None and self.carried.fullmatch(name)]
