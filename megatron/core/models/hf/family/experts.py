"""Experts in config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.config.interval import NOT_NEGATIVE, SIZE
from megatron.config.model import ModelConfig
from megatron.core.models.hf.config_json import JsonFields

# The number of experts in the families in which transformers takes either name.
EITHER = ("num_experts", "num_local_experts")


def read_experts(fields: JsonFields, *, number: int, topk: int, names: Sequence[str] = EITHER) -> dict[str, Any]:
    """Returns the flags of the number of experts and of the experts per token.

    `number` and `topk` are the values of a configuration without these fields. `names` are the names that the field
    with the number of experts may have.

    The loss that balances the experts is a setting of each run here, and in transformers only if output_router_logits
    is true. Its definition differs, too, so its coefficient is not taken over.
    """
    counts = {name: fields.integer(name, SIZE) for name in names if fields.optional_integer(name, SIZE) is not None}
    if len(set(counts.values())) > 1:
        raise fields.error(
            f"num_experts is {counts['num_experts']} and num_local_experts {counts['num_local_experts']}"
        )
    experts, chosen = next(iter(counts.values()), number), fields.integer("num_experts_per_tok", SIZE, topk)
    if chosen > experts:
        raise fields.error(f"num_experts_per_tok is {chosen}; there are {experts} experts")
    fields.take("output_router_logits", bool, False)
    fields.number("router_aux_loss_coef", NOT_NEGATIVE, 0.0)
    return {"num_experts": experts, "moe_router_topk": chosen}


def read_normalization(fields: JsonFields, default: bool = False) -> dict[str, Any]:
    """Returns the flag for norm_topk_prob: a softmax over the chosen experts is one over all, divided by the chosen
    sum. default: that of a file without the field."""
    return {"moe_router_pre_softmax": not fields.take("norm_topk_prob", bool, default)}


def write_normalization(model: ModelConfig) -> dict[str, Any]:
    """The field norm_topk_prob."""
    return {"norm_topk_prob": model.normalizes_topk}


def read_layers_with_experts(fields: JsonFields, default: Sequence[bool]) -> list[bool]:
    """Returns whether each layer has experts, as mlp_layer_types says; without it as `default` says."""
    layers, names = len(default), ["sparse" if has_experts else "dense" for has_experts in default]
    kinds: list[Any] = fields.take("mlp_layer_types", list, names)
    if len(kinds) != layers or {*kinds} - {"dense"} != {"sparse"}:
        raise fields.error(f"mlp_layer_types has to name {layers} layers, each dense or sparse, and one of them sparse")
    return [kind == "sparse" for kind in kinds]


def mlp_layer_types(model: ModelConfig) -> list[str]:
    """Returns the value of mlp_layer_types."""
    return ["sparse" if has_experts else "dense" for has_experts in model.moe_layers]


def layer_freq(with_experts: Sequence[bool]) -> str | None:
    """Returns --moe-layer-freq. Always a list, because Megatron-LM counts the layers of a number N from 0: 0, N, 2N."""
    return None if all(with_experts) else str([int(has_experts) for has_experts in with_experts])
