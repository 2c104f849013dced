"""The router after its product, each way in one pass over the logits: the interface of ops/routing.py's RouterKernels.

A program has some tokens, and all logits of a token in registers. It finds the k highest scores one after the other, as
integers in the order of the scores, so that equal ones are taken in the order of the experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.ops.routing import SMALLEST_SUM, Routed
from megatron.spec.moe import RouterSpec

ELEMENTS, WARPS = 1024, 4  # logits and warps of a program
LOWEST = tl.constexpr(-(2**31))
SMALLEST = tl.constexpr(SMALLEST_SUM)


@triton.jit
def _scores(logits, inside, SOFTMAX: tl.constexpr):
    """[tokens, experts] -> scores, 0 outside."""
    if SOFTMAX:
        powers = tl.exp(logits - tl.max(logits, 1)[:, None])
        return tl.where(inside, tl.div_rn(powers, tl.sum(powers, 1)[:, None] + tl.zeros_like(powers)), 0.0)
    ones = tl.zeros_like(logits) + 1.0
    return tl.where(inside, tl.div_rn(ones, 1.0 + tl.exp(-logits)), 0.0)


@triton.jit
def _load(logits_ptr, token, expert, tokens, experts):
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    # Rows of no token are zeros: they have scores, which nobody reads.
    outside = tl.where((token < tokens)[:, None], float("-inf"), 0.0)
    logits = tl.load(logits_ptr + token.to(tl.int64)[:, None] * experts + expert[None, :], mask=inside, other=0.0)
    return tl.where(inside, logits, outside), inside


@triton.jit
def _route(
    logits_ptr, bias_ptr, forced_ptr, scores_ptr, chosen_ptr, weights_ptr, tokens, experts, scaling,
    SOFTMAX: tl.constexpr, BIASED: tl.constexpr, FORCED: tl.constexpr, NORMALIZED: tl.constexpr, TOPK: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert, slot = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    logits, inside = _load(logits_ptr, token, expert, tokens, experts)
    scores = _scores(logits, inside, SOFTMAX)
    tl.store(scores_ptr + token.to(tl.int64)[:, None] * experts + expert[None, :], scores, mask=inside)
    place = token.to(tl.int64)[:, None] * TOPK + slot[None, :]
    is_slot = (token < tokens)[:, None] & (slot < TOPK)[None, :]
    weights = tl.zeros((TOKENS, SLOTS), tl.float32)
    if FORCED:
        chosen = tl.load(forced_ptr + place, mask=is_slot, other=-1).to(tl.int32)
        for i in range(TOPK):
            best = tl.sum(tl.where(slot[None, :] == i, chosen, 0), 1)
            score = tl.sum(tl.where(expert[None, :] == best[:, None], scores, 0.0), 1)  # 0 where it is -1
            weights = tl.where(slot[None, :] == i, score[:, None], weights)
    else:
        chosen = tl.zeros((TOKENS, SLOTS), tl.int32)
        candidates = scores
        if BIASED:
            candidates += tl.load(bias_ptr + expert, mask=expert < experts, other=0.0)[None, :]
        bits = (candidates + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is 0
        keys = tl.where((expert < experts)[None, :], bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)
        for i in range(TOPK):
            best = tl.min(tl.where(keys == tl.max(keys, 1)[:, None], expert[None, :], EXPERTS), 1)
            is_best = expert[None, :] == best[:, None]
            score = tl.sum(tl.where(is_best, scores, 0.0), 1)
            chosen = tl.where(slot[None, :] == i, best[:, None], chosen)
            weights = tl.where(slot[None, :] == i, score[:, None], weights)
            keys = tl.where(is_best, LOWEST, keys)
    if NORMALIZED:
        weights = tl.div_rn(weights, tl.sum(weights, 1)[:, None] + SMALLEST + tl.zeros_like(weights))
    tl.store(chosen_ptr + place, chosen.to(tl.int64), mask=is_slot)
    tl.store(weights_ptr + place, weights * scaling, mask=is_slot)


@triton.jit
def _gradient(
    logits_ptr, chosen_ptr, grad_ptr, prices_ptr, z_weight_ptr, routed_ptr, out_ptr, tokens, experts, samples, scaling,
    SOFTMAX: tl.constexpr, NORMALIZED: tl.constexpr, PRICED: tl.constexpr, HAS_Z: tl.constexpr, ROUTED: tl.constexpr,
    TOPK: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    logits, inside = _load(logits_ptr, token, expert, tokens, experts)
    scores = _scores(logits, inside, SOFTMAX)
    place = token.to(tl.int64) * TOPK
    into = tl.zeros_like(scores)  # the gradient of the scores
    taken = tl.zeros_like(scores)  # 1 for the chosen experts
    for i in range(TOPK):
        best = tl.load(chosen_ptr + place + i, mask=token < tokens, other=-1)
        grad = tl.load(grad_ptr + place + i, mask=token < tokens, other=0.0)
        is_best = expert[None, :] == best[:, None]
        into = tl.where(is_best, grad[:, None] * scaling, into)
        taken = tl.where(is_best, 1.0, taken)
    if NORMALIZED:
        total = tl.sum(taken * scores, 1)[:, None] + SMALLEST
        into = taken * (into - tl.sum(into * scores, 1)[:, None] / total) / total
    if ROUTED:
        routed = tl.load(routed_ptr + token, mask=token < tokens, other=0).to(tl.float32)[:, None]
    else:
        routed = 1.0
    if PRICED:
        of_sample = (token % samples)[:, None] * experts + expert[None, :]
        price = tl.load(prices_ptr + of_sample, mask=inside, other=0.0) * routed
        if SOFTMAX:
            into += price
        else:
            total = tl.sum(scores, 1)[:, None] + SMALLEST
            into += (price - tl.sum(price * scores, 1)[:, None] / total) / total
    if SOFTMAX:
        out = scores * (into - tl.sum(into * scores, 1)[:, None])
    else:
        out = into * scores * (1.0 - scores)
    if HAS_Z:
        most = tl.max(logits, 1)[:, None]
        powers = tl.where(inside, tl.exp(logits - most), 0.0)
        total = tl.sum(powers, 1)[:, None] + tl.where((token < tokens)[:, None], 0.0, 1.0)
        out += powers / total * (most + tl.log(total)) * (2.0 * tl.load(z_weight_ptr)) * routed
    tl.store(out_ptr + token.to(tl.int64)[:, None] * experts + expert[None, :], out, mask=inside)


def route(logits: Tensor, bias: Tensor | None, rule: RouterSpec, forced: Tensor | None) -> Routed:
    """Chooses the experts of each token and their weights, for fp32 logits and experts without groups. See Route."""
    tokens, experts = logits.shape
    scores = torch.empty_like(logits)
    chosen = torch.empty(tokens, rule.topk, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, rule.topk, dtype=torch.float32, device=logits.device)
    if tokens:
        of_program, wide = _tile(experts)
        _route[(triton.cdiv(tokens, of_program),)](
            logits.contiguous(), logits if bias is None else bias, chosen if forced is None else forced.contiguous(),
            scores, chosen, weights, tokens, experts, rule.scaling,
            rule.score_function == "softmax", bias is not None, forced is not None, rule.normalized, rule.topk,
            of_program, wide, triton.next_power_of_2(rule.topk), num_warps=WARPS,
        )  # fmt: skip
    return Routed(scores, chosen, weights)


def gradient(
    logits: Tensor,
    chosen: Tensor,
    grad: Tensor,
    rule: RouterSpec,
    *,
    prices: Tensor | None,
    z_weight: Tensor | None,
    routed: Tensor | None,
) -> Tensor:
    """Returns the gradient of fp32 logits [T, E]. See RouterKernels."""
    tokens, experts = logits.shape
    out = torch.empty_like(logits)
    if tokens:
        of_program, wide = _tile(experts)
        _gradient[(triton.cdiv(tokens, of_program),)](
            logits.contiguous(), chosen.contiguous(), grad.contiguous(),
            logits if prices is None else prices.contiguous(), logits if z_weight is None else z_weight,
            logits if routed is None else routed.contiguous(), out,
            tokens, experts, 1 if prices is None else len(prices), rule.scaling,
            rule.score_function == "softmax", rule.normalized, prices is not None, z_weight is not None,
            routed is not None, rule.topk, of_program, wide, num_warps=WARPS,
        )  # fmt: skip
    return out


def _tile(experts: int) -> tuple[int, int]:
    """Returns the tokens of a program, and experts as a power of two."""
    wide = triton.next_power_of_2(experts)
    return max(1, ELEMENTS // wide), wide
