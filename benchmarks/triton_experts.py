"""The calls of the experts of a layer of Qwen3-30B-A3B in Triton, for triton_kernels.py."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from megatron.kernels.ops.assignments import Assignments, Picked, RowOrder
from megatron.kernels.ops.fp8.formats import E4M3, E5M2
from megatron.kernels.ops.fp8.grouped import ExpertStack
from megatron.kernels.ops.fp8.quantize import SQUARE, VECTOR, Quantized
from megatron.spec.moe import RouterSpec

HIDDEN, WIDTH, EXPERTS, TOPK = 2048, 768, 128, 8


def expert_calls(tokens: int, device: str) -> dict[str, Callable[[], object]]:
    """The calls in bf16, for `tokens` rows with TOPK experts each."""
    of_weights = _module("expert_weight_grad")
    count = tokens * TOPK

    def half(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16, device=device)

    assignments = _assignments(count, device)
    rows, inner, activated = half(tokens, HIDDEN), half(count, 2 * WIDTH), half(count, WIDTH)
    picked = Picked(rows, assignments.rows)
    fc1, fc2 = (
        torch.zeros(*shape, device=device) for shape in ((EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    )
    calls: dict[str, Callable[[], object]] = {}
    for name, overwrite in (("", True), (", added", False)):
        calls[f"gradient of fc1{name}"] = lambda overwrite=overwrite: of_weights.write_weight_grads(
            fc1, Picked(inner, None), picked, assignments, overwrite
        )
        calls[f"gradient of fc2{name}"] = lambda overwrite=overwrite: of_weights.write_weight_grads(
            fc2, picked, Picked(activated, None), assignments, overwrite
        )
    weights = torch.zeros(count, device=device)
    gated = _module("weighted_activation").swiglu
    calls["weighted SwiGLU"] = lambda: gated.product(inner, None, weights)
    calls["weighted SwiGLU backward"] = lambda: gated.gradient(
        activated, inner, None, weights, take=lambda product: None, wants_inner=True
    )
    rows_of = _module("assigned_rows")
    by_row = RowOrder(assignments.rows, torch.zeros(tokens, dtype=torch.int64, device=device))
    calls["rows of assignments"] = lambda: rows_of.gather(rows, assignments.rows)
    calls["sums of assignments"] = lambda: rows_of.add_up(half(count, HIDDEN), by_row)
    router, rule = _module("routing"), RouterSpec(HIDDEN, EXPERTS, TOPK, "softmax", normalized=True)
    logits, of_tokens = torch.zeros(tokens, EXPERTS, device=device), torch.zeros(tokens, TOPK, device=device)
    calls["router"] = lambda: router.route(logits, None, rule, None)
    calls["router backward"] = lambda: router.gradient(
        logits, of_tokens.long(), of_tokens, rule, prices=logits[:1].clone(), z_weight=None, routed=None
    )
    order, chosen = _module("assign"), torch.zeros(tokens, TOPK, dtype=torch.int64, device=device)
    calls["order of assignments"] = lambda: order.assign(chosen, 0, EXPERTS)
    return calls


def fp8_expert_calls(tokens: int, device: str) -> dict[str, Callable[[], object]]:
    """The FP8 products of as many rows: the output of fc1, and the gradient of its input."""
    multiply, count = _module("grouped_fp8").multiply, tokens * TOPK
    assignments = _assignments(count, device)

    def full(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    calls: dict[str, Callable[[], object]] = {}
    for name, k, n, of, transposed in (
        ("output of fc1", HIDDEN, 2 * WIDTH, E4M3, False),
        ("gradient of fc1's input", 2 * WIDTH, HIDDEN, E5M2, True),
    ):
        shape = (n, EXPERTS * k) if transposed else (EXPERTS * n, k)
        data, weight, out = full(count, k, dtype=of), full(*shape, dtype=E4M3), full(count, n, dtype=torch.bfloat16)
        of_blocks = Quantized(data, full(k // 128, count).t(), VECTOR), full(shape[0] // 128, shape[1] // 128)
        of_tensor = Quantized(data, full(1), None), full(1)
        for recipe, (rows, inverse) in (("1 x 128", of_blocks), ("one scale", of_tensor)):
            block = None if rows.block is None else SQUARE
            stack = ExpertStack(Quantized(weight, inverse, block), EXPERTS, transposed)
            calls[f"FP8, {recipe}, {name}"] = functools.partial(
                multiply, rows, None if transposed else assignments.rows, stack, out, assignments
            )
    return calls


def _assignments(count: int, device: str) -> Assignments:
    return Assignments(
        torch.zeros(count, dtype=torch.int64, device=device),
        torch.zeros(EXPERTS, dtype=torch.int32, device=device),
        [count // EXPERTS] * EXPERTS,
    )


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"megatron.kernels.backends.triton.{name}")
