"""Training of experts: balance between them, capacity, and the exchange of tokens. None of it changes the model's
shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.flag import Need, flag
from megatron.config.interval import NEGATIVE, NOT_NEGATIVE, POSITIVE
from megatron.config.moe import EXPERTS

AUX, SEQ_AUX, GLOBAL_AUX, SINKHORN, NONE = BALANCING = (
    "aux_loss",
    "seq_aux_loss",
    "global_aux_loss",
    "sinkhorn",
    "none",
)
ALL_TO_ALL, ALL_GATHER = "alltoall", "allgather"


def _has_capacity(run: Any) -> bool:
    return run.moe.moe_expert_capacity_factor is not None


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """All losses and capacities are defined over samples and batches, so no layout changes them."""

    moe_router_load_balancing_type: tuple[str, ...] = flag(
        (AUX,),
        "losses that balance the experts: over the samples of a microbatch, over each sample, or over the global batch "
        "before this one; several are added. Without a loss, sinkhorn balances the choices of a microbatch while it "
        "trains",
        choices=BALANCING,
        nargs="+",
        metavar="TYPE",
        needs=EXPERTS,
    )
    moe_aux_loss_coeff: tuple[float, ...] = flag(
        (0.0,),
        "coefficient of each loss of --moe-router-load-balancing-type; each is 1 where all experts have the same load",
        nargs="+",
        within=NOT_NEGATIVE,
        needs=(
            EXPERTS,
            Need(
                lambda run: run.moe.moe_router_load_balancing_type != (NONE,),
                "--moe-router-load-balancing-type is none",
                "give another type",
            ),
        ),
    )
    moe_z_loss_coeff: float | None = flag(
        None,
        "coefficient of the mean of the router's squared log-sum-exp, which keeps logits small (ST-MoE)",
        within=NOT_NEGATIVE,
        needs=EXPERTS,
    )
    moe_router_bias_update_rate: float = flag(
        1e-3,
        "change of an expert's bias per step: up if its load was below the mean, down if it was above",
        within=NOT_NEGATIVE,
        needs=(
            EXPERTS,
            Need(
                lambda run: run.model.moe_router_enable_expert_bias,
                "the experts have no bias",
                "give --moe-router-enable-expert-bias",
            ),
        ),
    )
    moe_expert_capacity_factor: float | None = flag(
        None,
        "most tokens of a sample that an expert takes, in units of the mean load; the others skip it; default no "
        "limit, which a number below 0 asks for, too",
        within=POSITIVE,
        off=NEGATIVE,
        needs=EXPERTS,
    )
    moe_token_drop_policy: str = flag(
        "probs",
        "tokens that an expert at its capacity keeps: those with the highest weights, or the first of the sample",
        choices=("probs", "position"),
        needs=(EXPERTS, Need(_has_capacity, "no expert has a limit", "give --moe-expert-capacity-factor")),
    )
    moe_token_dispatcher_type: str = flag(
        ALL_TO_ALL,
        "how tokens travel to their experts: one copy to each rank that has some of its experts, or all tokens to all "
        "ranks",
        choices=(ALL_TO_ALL, ALL_GATHER),
        needs=EXPERTS,
    )
    moe_router_force_load_balancing: bool = flag(
        False, "choose experts in turn, whatever the router says, to measure the speed of a balanced run", needs=EXPERTS
    )
    moe_per_layer_logging: bool = flag(
        False, "log load and balance losses of every layer, not only of all together", needs=EXPERTS
    )
