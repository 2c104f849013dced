"""The kernels of experts in a run: those in Triton where they run and compute the same, else plain torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.kernels import fused
from megatron.kernels.ops import assignments, routing
from megatron.kernels.ops.assignments import Assign, Assignments, Picked, RowKernels, row_order
from megatron.kernels.ops.expert_weight_grad import ExpertWeightGrad, one_by_one
from megatron.kernels.ops.weight_grad import WeightGrad, separate
from megatron.kernels.ops.weighted_activation import Separate, WeightedActivation
from megatron.spec.mlp import GEGLU, GEGLU_TANH, SWIGLU
from megatron.spec.moe import RouterSpec

_SIZES = [70, 0, 3, 131]  # assignments of the experts of a trial: more than a tile, none, less than one


class ExpertOps(NamedTuple):
    """Kernels of experts besides their products (grouped_gemm.py).

    The keys of `activations` are the names of the model's specification. An activation that is missing there is
    computed first and weighted afterwards.

    """

    weight_grad: ExpertWeightGrad
    activations: Mapping[str, WeightedActivation]
    rows: RowKernels
    router: routing.RouterKernels
    assign: Assign


def plain(weight_grad: WeightGrad) -> ExpertOps:
    """The kernels of plain torch; `weight_grad` computes the weight gradient of one matrix."""
    return ExpertOps(
        one_by_one(weight_grad), MappingProxyType({}), assignments.SEPARATE, routing.SEPARATE, assignments.assign
    )


def load() -> ExpertOps:
    """Returns the kernels in Triton, which is imported here."""
    name = "megatron.kernels.backends.triton"
    of_weights, gated, rows, router, order = (
        importlib.import_module(f"{name}.{module}")
        for module in ("expert_weight_grad", "weighted_activation", "assigned_rows", "routing", "assign")
    )
    return ExpertOps(
        of_weights.write_weight_grads,
        MappingProxyType({SWIGLU: gated.swiglu, GEGLU: gated.geglu, GEGLU_TANH: gated.geglu_tanh}),
        RowKernels(rows.gather, rows.add_up),
        routing.RouterKernels(F.linear, router.route, router.gradient),
        order.assign,
    )


def choose_experts(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, weight_grad: WeightGrad
) -> tuple[ExpertOps, str]:
    """Returns the kernels, and "those in Triton (why not the others)" for the start-up table.

    weight_grad: computes the weight gradient of one matrix, for plain torch. Each kernel is tried on a few rows.
    """
    chosen = plain(weight_grad)
    why = "the model has no experts" if config.num_experts is None else fused.missing(device)
    if why is not None:
        return chosen, f"none ({why})"
    candidates = load()
    trials: dict[str, fused.KernelTrial] = {
        "weight_grad": (
            "weight gradients",
            _no_weight_grad(config, dtype),
            lambda: _try_weight_grad(candidates.weight_grad, device, dtype),
        ),
        "activations": (
            "weighted activation",
            _no_activation(config),
            lambda: _try_activation(candidates.activations, config, device, dtype),
        ),
        "router": ("router", _no_router(config), lambda: _try_router(candidates.router, config, device)),
        "assign": ("order", None, lambda: _try_order(candidates.assign, config, device)),
        "rows": ("rows", None, lambda: _try_rows(candidates.rows, device, dtype)),
    }
    return fused.choose_tried(chosen, candidates, trials)


def _no_weight_grad(config: ModelConfig, dtype: torch.dtype) -> str | None:
    if not config.gradient_accumulation_fusion:
        return "--no-gradient-accumulation-fusion"
    return "GPUs multiply fp32 faster in torch" if dtype == torch.float32 else None


def _no_activation(config: ModelConfig) -> str | None:
    return fused.no_fused_gate(config) if config.gated else "it has no gate"


def _no_router(config: ModelConfig) -> str | None:
    if (config.moe_router_num_groups or 1) > 1:
        return "experts have groups"
    return "--moe-router-dtype is fp64" if config.moe_router_dtype == "fp64" else None


def _assignments(device: torch.device) -> Assignments:
    """Returns assignments of 256 rows, of which every expert picks some."""
    rows = [torch.arange(size, device=device) * 256 // max(size, 1) for size in _SIZES]
    ends = torch.tensor(_SIZES, device=device).cumsum(0).int()
    return Assignments(torch.cat(rows), ends, _SIZES)


def _try_weight_grad(kernel: ExpertWeightGrad, device: torch.device, dtype: torch.dtype) -> None:
    """Raises an error if the kernel cannot run, or gives wrong results."""
    assignments = _assignments(device)
    wide, narrow = (fused.numbers(device, dtype, rows, width) for rows, width in ((256, 272), (sum(_SIZES), 144)))
    for shape, grads, values in (
        ((272, 144), Picked(wide, assignments.rows), Picked(narrow, None)),
        ((144, 272), Picked(narrow, None), Picked(wide, assignments.rows)),
    ):
        results: list[tuple[Tensor, ...]] = []
        for product in (kernel, one_by_one(separate)):
            main_grad = torch.full((len(_SIZES), *shape), float("nan"), device=device)
            for overwrite in (True, False):
                product(main_grad, grads, values, assignments, overwrite)
            results.append((main_grad,))
        fused.compare(*results)


def _try_activation(
    activations: Mapping[str, WeightedActivation], config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Raises an error if a kernel cannot run, or gives wrong results."""
    inner, grad = (fused.numbers(device, dtype, 64, width, turns=turns) for width, turns in ((256, 0.7), (128, 1.1)))
    weights = fused.numbers(device, torch.float32, 64, turns=1.3)
    for name in (SWIGLU,) if config.swiglu else (GEGLU, GEGLU_TANH):
        results: list[tuple[Tensor, ...]] = []
        for activation in (activations[name], Separate(fused.SEPARATE.activations[name])):
            products: list[Tensor] = []
            grad_inner, grad_weights = activation.gradient(
                grad.clone(), inner, None, weights, take=products.append, wants_inner=True
            )
            assert grad_inner is not None
            results.append((activation.product(inner, None, weights), products[0], grad_inner, grad_weights))
        fused.compare(*results)


def _try_rows(kernels: RowKernels, device: torch.device, dtype: torch.dtype) -> None:
    """Raises an error if a kernel cannot run, or gives wrong results."""
    sorted_rows = _assignments(device)
    rows, by_row = fused.numbers(device, dtype, 256, 264), row_order(sorted_rows, 256)
    results: list[tuple[Tensor, ...]] = []
    for row_kernels in (kernels, assignments.SEPARATE):
        gathered = row_kernels.gather(rows, sorted_rows.rows)
        results.append((gathered, row_kernels.add_up(gathered, by_row)))
    fused.compare(*results)


def _try_router(kernels: routing.RouterKernels, config: ModelConfig, device: torch.device) -> None:
    """Raises an error if a kernel cannot run, or gives wrong results."""
    assert config.hidden_size and config.num_experts
    rule = RouterSpec(
        config.hidden_size,
        config.num_experts,
        config.moe_router_topk,
        config.moe_router_score_function,
        config.normalizes_topk,
        config.moe_router_topk_scaling_factor or 1.0,
        has_bias=config.moe_router_enable_expert_bias,
    )
    logits = fused.numbers(device, torch.float32, 64, rule.experts).mul_(4.0)
    bias = fused.numbers(device, torch.float32, rule.experts, turns=1.1) if rule.has_bias else None
    grad = fused.numbers(device, torch.float32, 64, rule.topk, turns=1.3)
    prices = fused.numbers(device, torch.float32, 2, rule.experts, turns=1.7)
    results: list[tuple[Tensor, ...]] = []
    for router in (kernels, routing.SEPARATE):
        routed = router.route(logits, bias, rule, None)
        gradient = router.gradient(
            logits, routed.chosen, grad, rule, prices=prices, z_weight=grad.sum(), routed=grad[:, 0] > 0
        )
        results.append((*routed, gradient))
    fused.compare(*results)


def _try_order(kernel: Assign, config: ModelConfig, device: torch.device) -> None:
    """Raises an error if the kernel cannot run, or gives wrong results."""
    assert config.num_experts
    k, tokens = config.moe_router_topk, 64
    places = torch.arange(tokens, device=device).unsqueeze(1) * 5 + torch.arange(k, device=device)
    indices = (places % config.num_experts).masked_fill(places % 7 == 0, -1)
    first, experts = config.num_experts // 3, config.num_experts // 2 or 1
    results = []
    for assign in (kernel, assignments.assign):
        assigned = assign(indices, first, experts)
        total = int(assigned.ends[-1])
        order = row_order(Assignments(assigned.rows[:total], assigned.ends, [], assigned.by_row), tokens)
        results.append(
            (assigned.positions[:total], assigned.rows[:total], assigned.ends, order.order[:total], order.starts)
        )
    if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
        raise RuntimeError("its results are wrong")
