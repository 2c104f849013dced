"""Mixture of experts as a part of the model: the layers that have experts, and the router's choice among them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.base.errors import ConfigError
from megatron.config.flag import Need, flag
from megatron.config.interval import POSITIVE, SIZE, ZERO
from megatron.config.layers import layer_pattern

SOFTMAX, SIGMOID = "softmax", "sigmoid"
EXPERTS = Need(lambda run: run.model.num_experts is not None, "the model has no experts", "give --num-experts")
_GROUPS = Need(
    lambda run: run.model.moe_router_num_groups is not None,
    "the experts are not divided into groups",
    "give --moe-router-num-groups",
)
_SHARED = Need(
    lambda run: run.model.moe_shared_expert_intermediate_size is not None,
    "there is no shared expert",
    "give --moe-shared-expert-intermediate-size",
)
_SOFTMAX = Need(
    lambda run: run.model.moe_router_score_function == SOFTMAX,
    "--moe-router-score-function is sigmoid",
    "give --moe-router-score-function softmax",
)


@dataclass(frozen=True, kw_only=True)
class MoEModel:
    """Fields of ModelConfig. A mixture-of-experts layer has a router and experts instead of one MLP."""

    num_experts: int | None = flag(
        None,
        "number of experts in a mixture-of-experts layer; without it, or with 0, all layers are dense",
        within=SIZE,
        off=ZERO,
    )
    moe_layer_freq: str | None = flag(
        None,
        "layers with experts: a number N for layers 0, N, 2N, ..., or a list with one number per layer, 1 for experts "
        "and 0 for a dense MLP, such as [0,1,1,1] or ([0]*1+[1]*26); default all layers",
        metavar="PATTERN",
        needs=EXPERTS,
    )
    moe_ffn_hidden_size: int | None = flag(
        None, "width of an expert's MLP; default that of --ffn-hidden-size", within=SIZE, needs=EXPERTS
    )
    moe_router_topk: int = flag(2, "experts per token", within=SIZE, needs=EXPERTS)
    moe_router_score_function: str = flag(
        SOFTMAX,
        "scores of the experts of a token: the softmax over all logits, or the sigmoid of each (DeepSeek-V3)",
        choices=(SOFTMAX, SIGMOID),
        needs=EXPERTS,
    )
    moe_router_pre_softmax: bool = flag(
        False,
        "weigh the chosen experts by the softmax over all experts, so that the weights sum to less than 1; without it "
        "the softmax is over the chosen ones",
        needs=(EXPERTS, _SOFTMAX),
    )
    moe_router_topk_normalization: str = flag(
        "auto",
        "divide the weights of the chosen experts by their sum; auto does so except with --moe-router-pre-softmax, and "
        "with sigmoid scores if a token has only one expert",
        choices=("auto", "on", "off"),
        needs=EXPERTS,
    )
    moe_router_num_groups: int | None = flag(
        None, "divide the experts into this many equal groups of neighbours", within=SIZE, needs=EXPERTS
    )
    moe_router_group_topk: int | None = flag(
        None, "groups from which the experts of a token are chosen", within=SIZE, needs=EXPERTS
    )
    moe_router_group_score: str = flag(
        "sum",
        "score by which groups are chosen: the sum of the best --moe-router-topk / --moe-router-group-topk experts in "
        "the group (DeepSeek-V3), or the maximum (DeepSeek-V2)",
        choices=("sum", "max"),
        needs=(EXPERTS, _GROUPS),
    )
    moe_router_topk_scaling_factor: float | None = flag(
        None, "factor on the weights of the chosen experts", within=POSITIVE, needs=EXPERTS
    )
    moe_router_dtype: str = flag(
        "fp32", "precision of the router's logits and scores", choices=("fp32", "fp64"), needs=EXPERTS
    )
    moe_router_enable_expert_bias: bool = flag(
        False,
        "balance the experts by a bias on their scores, which decides about the choice only, and which each step "
        "changes by --moe-router-bias-update-rate (auxiliary-loss-free balancing)",
        needs=EXPERTS,
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "width of all shared experts together, which every token passes", within=SIZE, needs=EXPERTS
    )
    moe_shared_expert_gate: bool = flag(
        False, "multiply the output of the shared experts by a learned gate per token", needs=(EXPERTS, _SHARED)
    )

    def moe_layers_of(self, num_layers: int) -> tuple[bool, ...]:
        """Returns whether each layer has experts. Raises ConfigError for a pattern that does not fit."""
        if self.num_experts is None:
            return (False,) * num_layers
        if self.moe_layer_freq is None:
            return (True,) * num_layers
        try:
            pattern = layer_pattern(self.moe_layer_freq, num_layers)
        except ValueError as error:
            raise ConfigError(f"--moe-layer-freq {self.moe_layer_freq} {error}") from None
        if isinstance(pattern, int):
            return tuple(layer % pattern == 0 for layer in range(num_layers))
        return tuple(bool(has_experts) for has_experts in pattern)

    @property
    def groups_by_logits(self) -> bool:
        """Whether sums of logits choose groups of experts: of a softmax over the chosen experts, as in Megatron-LM."""
        over_chosen = self.moe_router_score_function != SIGMOID and not self.moe_router_pre_softmax
        return over_chosen and (self.moe_router_num_groups or 1) > 1 and self.moe_router_group_score == "sum"

    @property
    def normalizes_topk(self) -> bool:
        """Whether the weights of the chosen experts are divided by their sum."""
        if self.moe_router_topk_normalization != "auto":
            return self.moe_router_topk_normalization == "on"
        if self.moe_router_score_function == SIGMOID:
            return self.moe_router_topk > 1
        return not self.moe_router_pre_softmax
