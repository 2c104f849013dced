"""The rows of the start-up table about mixture of experts."""

from __future__ import annotations

from megatron.base.mesh import Mesh
from megatron.config.features.feature import Feature, on_or_off
from megatron.config.model import ModelConfig
from megatron.config.moe import SIGMOID
from megatron.config.moe_training import AUX, GLOBAL_AUX, NONE, SEQ_AUX, SINKHORN, MoEConfig

# The tokens whose choices make the loads of each loss.
_LOADS = {
    AUX: "a microbatch",
    SEQ_AUX: "each sample",
    GLOBAL_AUX: "the global batch before, dp times as strong as in Megatron-LM",
}


def moe_features(model: ModelConfig, moe: MoEConfig, mesh: Mesh, *, hides: bool, trains: bool) -> list[Feature]:
    """Returns the rows of a model with experts; of a dense one none. hides: --overlap-moe-expert-parallel-comm."""
    if model.num_experts is None:
        return []
    return [
        _experts(model, mesh),
        _router(model, forced=moe.moe_router_force_load_balancing),
        _balance(model, moe, trains=trains),
        _capacity(moe),
        _dispatcher(moe.moe_token_dispatcher_type, mesh),
        _hidden_exchanges(model, mesh, requested=hides, trains=trains),
    ]


def _experts(model: ModelConfig, mesh: Mesh) -> Feature:
    assert model.num_experts
    requested = f"{model.moe_router_topk} of {model.num_experts}, ep {mesh.ep}, etp {mesh.etp}"
    if model.moe_shared_expert_intermediate_size is not None:
        requested += f", and shared ones of width {model.moe_shared_expert_intermediate_size}"
    layers = model.moe_layers
    experts = model.num_experts // mesh.ep
    where = f"{sum(layers)} of {len(layers)} layers, {experts} expert{'s' * (experts > 1)} per rank, edp {mesh.edp}"
    return Feature("experts", requested, f"{requested}: {where}", "")


def _router(model: ModelConfig, *, forced: bool) -> Feature:
    if model.moe_router_score_function == SIGMOID:
        rule = "sigmoid" + (", normalized" if model.normalizes_topk else "")
    else:
        rule = f"softmax over {'the chosen' if model.normalizes_topk else 'all'}"
    if model.moe_router_group_topk is not None:
        score = model.moe_router_group_score + (" of logits" if model.groups_by_logits else "")
        rule += f", best {model.moe_router_group_topk} of {model.moe_router_num_groups} groups by {score}"
    requested = f"{rule}, {model.moe_router_dtype}"
    if forced:
        return Feature("router", requested, "experts in turn", "--moe-router-force-load-balancing")
    return Feature("router", requested, requested, "")


def _balance(model: ModelConfig, moe: MoEConfig, *, trains: bool) -> Feature:
    """What changes the balance between experts, and the tokens whose choices count."""
    name = "expert balance"
    losses = dict(zip(moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff)) if _has_losses(moe) else {}
    requested = [f"{kind} {coefficient:g}" for kind, coefficient in losses.items()]
    in_effect = [f"{kind} {coefficient:g}" for kind, coefficient in losses.items() if coefficient > 0]
    further = [SINKHORN] if SINKHORN in moe.moe_router_load_balancing_type else []
    if moe.moe_z_loss_coeff:
        further.append(f"z-loss {moe.moe_z_loss_coeff:g}")
    if model.moe_router_enable_expert_bias:
        further.append(f"bias {moe.moe_router_bias_update_rate:g} per step")
    shown = ", ".join([*requested, *further]) or "off"
    if not trains:
        return Feature(name, shown, "off", "evaluation only" if shown != "off" else "")
    why = [f"loads of {kind}: {_LOADS[kind]}" for kind, coefficient in losses.items() if coefficient > 0]
    if len(in_effect) < len(requested):
        why.append("--moe-aux-loss-coeff is 0")
    return Feature(name, shown, ", ".join([*in_effect, *further]) or "off", "; ".join(why))


def _has_losses(moe: MoEConfig) -> bool:
    return not {NONE, SINKHORN} & set(moe.moe_router_load_balancing_type)


def _capacity(moe: MoEConfig) -> Feature:
    name, factor = "expert capacity", moe.moe_expert_capacity_factor
    if factor is None:
        return Feature(name, "off", "off", "")
    first = {"probs": "the tokens with the highest weights", "position": "the first tokens"}[moe.moe_token_drop_policy]
    requested = f"{factor:g} x the mean load of a sample"
    return Feature(name, requested, requested, f"an expert keeps {first}; the others skip it")


def _dispatcher(kind: str, mesh: Mesh) -> Feature:
    name, ranks = "token dispatcher", mesh.ep * mesh.etp
    if ranks == 1:
        return Feature(name, kind, "off", "ep x etp = 1: tokens stay where they are")
    return Feature(name, kind, f"{kind} over {ranks} ranks", "")


def _hidden_exchanges(model: ModelConfig, mesh: Mesh, *, requested: bool, trains: bool) -> Feature:
    """Shared experts hide a part of the exchange anyway."""
    name, shown = "exchange of tokens overlap", on_or_off(requested)
    if mesh.ep * mesh.etp == 1:
        return Feature(name, shown, "off", "ep x etp = 1: nothing is exchanged" if requested else "")
    shared = "behind shared experts" if model.moe_shared_expert_intermediate_size is not None else "off"
    if not requested:
        return Feature(name, "off", shared, "")
    if not trains:
        return Feature(name, shown, shared, "evaluation only")
    return Feature(name, shown, "behind another microbatch", "more microbatches are in flight")
