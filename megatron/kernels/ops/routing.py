"""Routing of tokens to experts: scores, the choice of experts, weights, and capacity. No communication.

T tokens, E experts, k experts per token. An index of -1 means that the token does not go to an expert. Rows do not
depend on each other and ties are broken by the lowest index, so the layout of a run, the device and the number of
tokens do not decide which experts are chosen.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.spec.moe import RouterSpec

SINKHORN_TOLERANCE, SINKHORN_EPSILON = 1e-4, 1e-8  # Megatron-LM's
SINKHORN_STEPS = 2.0**16  # numbers whose logarithms are closer than 1 / this are equal
SINKHORN_ROUNDS = 800  # a bound for logits so far apart that the scales never settle; usual ones take about ten
CAPACITY_STEPS = 2.0**16  # weights whose first 16 bits agree are equal for the capacity of an expert
SMALLEST_SUM = 1e-20  # scores can underflow to 0; DeepSeek-V3 adds the same


def scores(logits: Tensor, rule: RouterSpec) -> Tensor:
    """logits [T, E] in fp32 or fp64 -> scores in [0, 1] of the same shape and dtype; differentiable."""
    return logits.softmax(dim=-1) if rule.score_function == "softmax" else logits.sigmoid()


@torch.no_grad()
def choose(scores: Tensor, bias: Tensor | None, rule: RouterSpec) -> Tensor:
    """scores [T, E], or logits with `rule.by_logits`; bias [E] -> indices [T, k] int64 of the highest scores (plus
    bias) in descending order.

    With groups (DeepSeek-V2, arXiv 2405.04434) only the experts of the `rule.group_topk` best groups can be chosen. No
    gradient passes. NaN counts as the highest score; checking that scores are finite is left to the caller.
    """
    candidates = scores if bias is None else scores + bias
    if rule.groups > 1:
        grouped = candidates.unflatten(-1, (rule.groups, -1))
        best_groups = highest(_group_scores(grouped, rule), rule.group_topk)
        excluded = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best_groups, False)
        candidates = grouped.masked_fill(excluded.unsqueeze(-1), float("-inf")).flatten(-2)
    return highest(candidates, rule.topk)


@torch.no_grad()
def margins(scores: Tensor, bias: Tensor | None, rule: RouterSpec) -> Tensor:
    """Returns how clear the choice of each token is by the numbers that `choose` takes, [T].

    A margin is the least gap between a number that was chosen and one that was not, of experts and of groups, divided
    by the spread of the token's numbers.
    """
    candidates = scores if bias is None else scores + bias
    spread = (candidates.amax(-1) - candidates.amin(-1)).clamp(min=torch.finfo(scores.dtype).tiny)
    gaps = torch.full_like(spread, float("inf"))
    if rule.group_topk < rule.groups:
        grouped = candidates.unflatten(-1, (rule.groups, -1))
        gaps = _gap(_group_scores(grouped, rule), rule.group_topk)
        allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool)
        allowed.scatter_(-1, highest(_group_scores(grouped, rule), rule.group_topk), True)
        candidates = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)
    if rule.topk < candidates.shape[-1]:
        gaps = torch.minimum(gaps, _gap(candidates, rule.topk))
    return gaps / spread


def _gap(values: Tensor, k: int) -> Tensor:
    """Between the k-th and the next highest of each row."""
    best = values.topk(k + 1, dim=-1).values
    return best[..., k - 1] - best[..., k]


def highest(values: Tensor, k: int) -> Tensor:
    """[..., n] in fp32 or fp64 -> int64 indices [..., k] of the k highest values in descending order.

    Equal values (also 0 and -0) are taken in the order of their index: torch.topk leaves the order open, and devices
    differ. So fp32 values are turned into unique integers, their bits above the index. Those of fp64 leave no bits free
    and are sorted, which takes longer.
    """
    if values.dtype == torch.float64:
        return values.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()
    bits = (values + 0.0).view(torch.int32)  # -0 + 0 is 0
    ascending = bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF)).long()  # integers in the order of the values
    n = values.shape[-1]
    keys = ascending.bitwise_left_shift_(32).add_(torch.arange(n - 1, -1, -1, device=values.device))
    return keys.topk(k, dim=-1).indices


def weigh(scores: Tensor, indices: Tensor, rule: RouterSpec) -> Tensor:
    """scores [T, E] without bias, indices [T, k] -> weights [T, k] of the chosen experts, 0 where the index is -1.

    Differentiable. In the dtype of the scores; divided by their sum over the chosen if `rule.normalized`, and times
    `rule.scaling`.
    """
    chosen = scores.gather(-1, indices.clamp(min=0)).masked_fill(indices < 0, 0.0)
    if rule.normalized:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return chosen if rule.scaling == 1.0 else chosen * rule.scaling


class Routed(NamedTuple):
    """scores [T, E] of all experts, the chosen ones [T, k] int64, and their weights [T, k]."""

    scores: Tensor
    chosen: Tensor
    weights: Tensor


def route(logits: Tensor, bias: Tensor | None, rule: RouterSpec, forced: Tensor | None) -> Routed:
    """logits [T, E] -> scores, choice and weights. forced: the choice, [T, k], if it has been made already."""
    router_scores = scores(logits, rule)
    chosen = choose(logits if rule.by_logits else router_scores, bias, rule) if forced is None else forced
    return Routed(router_scores, chosen, weigh(router_scores, chosen, rule))


def probabilities_of(scores: Tensor, rule: RouterSpec) -> Tensor:
    """scores [T, E] -> probabilities of the experts: the scores, divided by their sum where it is not 1."""
    return scores if rule.score_function == "softmax" else scores / (scores.sum(1, keepdim=True) + SMALLEST_SUM)


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
    """Gradient of the logits [T, E], in their dtype, from that of the weights of the chosen experts, [T, k].

    Added to it are the gradients of: each probability of a token of sample t % b times its price, prices [b, E]; and
    z_weight [] times the squared log-sum-exp of each token's logits. routed [T] bool: the tokens that these two are
    about.
    """
    dtype = logits.dtype
    with torch.enable_grad():
        z = logits.detach().requires_grad_()
        router_scores = scores(z, rule)
        outputs, gradients = [weigh(router_scores, chosen, rule)], [grad.to(dtype)]
        is_routed = 1.0 if routed is None else routed.unsqueeze(1).to(dtype)
        if prices is not None:
            outputs.append(probabilities_of(router_scores, rule))
            gradients.append(prices.to(dtype).repeat(len(z) // len(prices), 1) * is_routed)
        if z_weight is not None:
            outputs.append(z.logsumexp(1, keepdim=True).square())
            gradients.append(torch.ones_like(outputs[-1]) * z_weight.to(dtype) * is_routed)
        (of_logits,) = torch.autograd.grad(outputs, z, gradients)
    return of_logits


class RouterKernels(NamedTuple):
    """logits: x [T, h], weight [E, h], bias [E] or None, all in the dtype of the router -> [T, E]; not differentiable.
    `route` and `gradient`."""

    logits: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    route: Callable[[Tensor, Tensor | None, RouterSpec, Tensor | None], Routed]
    gradient: Callable[..., Tensor]


SEPARATE = RouterKernels(F.linear, route, gradient)


def counts_by_sample(indices: Tensor, sample_of_token: Tensor, samples: int, experts: int) -> Tensor:
    """indices [T, k], sample_of_token [T] -> tokens of each sample at each expert, int64 [samples, experts].

    No synchronization with the host.
    """
    places = torch.where(indices >= 0, sample_of_token.unsqueeze(-1) * experts + indices, samples * experts).flatten()
    counts = torch.zeros(samples * experts + 1, dtype=torch.int64, device=indices.device)
    return counts.scatter_add_(0, places, torch.ones_like(places))[:-1].view(samples, experts)


@torch.no_grad()
def sinkhorn_choice(logits: Tensor, routed: Tensor | None, topk: int) -> Tensor:
    """logits [T, E] -> indices [T, k] of the experts that a balanced transport of tokens to experts prefers.

    Sinkhorn's algorithm scales the rows and columns of exp(logits) until all tokens weigh the same and all experts
    weigh the same, as in Megatron-LM (Clark et al., arXiv 2202.01169; a token's choice is the highest of its scaled
    row). All tokens count, so they must be those of a whole microbatch. In fp64: the order of sums does not decide
    about a choice. routed [T] bool: tokens that count; None: all do. Reads from the device once for every 8 rounds.
    """
    cost = logits.double().exp()
    if routed is not None:
        cost = cost * routed.unsqueeze(1)
    tokens, experts = len(cost) if routed is None else routed.sum(), cost.shape[1]
    of_experts, error = cost.new_ones(experts), cost.new_tensor(float("inf"))
    for number in range(SINKHORN_ROUNDS):
        if number % 8 == 0 and not bool(error > SINKHORN_TOLERANCE):
            break
        of_tokens = 1 / (tokens * (cost @ of_experts + SINKHORN_EPSILON))
        scaled = 1 / (experts * (of_tokens @ cost + SINKHORN_EPSILON))
        settled = error <= SINKHORN_TOLERANCE  # the rounds up to the next reading change nothing
        scaled = torch.where(settled, of_experts, scaled)
        error = torch.where(settled, error, (scaled - of_experts).abs().mean())
        of_experts = scaled
    # Equal tokens make all experts equal: then rounding must not decide, which differs between layouts.
    return highest(((logits.double() + of_experts.log()) * SINKHORN_STEPS).round(), topk)


def balanced_choice(token_numbers: Tensor, rule: RouterSpec) -> Tensor:
    """Numbers [T] of tokens in the global batch -> indices [T, k] that do not depend on the logits.

    E tokens with consecutive numbers give every expert the same load. The experts of a token are as far apart as its
    number of groups permits, so it visits as many ranks as it can.
    """
    width, per_group = rule.experts // rule.groups, -(-rule.topk // rule.group_topk)
    slots, tokens = torch.arange(rule.topk, device=token_numbers.device), token_numbers.unsqueeze(-1)
    group = (tokens + slots % rule.group_topk * (rule.groups // rule.group_topk)) % rule.groups
    within = (tokens // rule.groups + slots // rule.group_topk * (width // per_group)) % width
    return group * width + within


@torch.no_grad()
def within_capacity(
    indices: Tensor,
    weights: Tensor,
    sample_of_token: Tensor,
    position_of_token: Tensor,
    *,
    experts: int,
    capacity: int,
    policy: str,
) -> Tensor:
    """indices and weights [T, k], sample_of_token and position_of_token [T] -> the assignments that are kept, bool [T,
    k].

    An expert keeps at most `capacity` tokens of each sample: with policy "probs" those of the highest weights and,
    among weights that are equal in their first 16 bits, of the lowest position; with "position" those of the lowest
    position. All tokens of a sample must be here, in any order. An index of -1 is not kept.
    """
    order, queues = _queues(indices, weights, sample_of_token, position_of_token, experts, policy)
    place = torch.arange(len(queues), device=queues.device) - torch.searchsorted(queues, queues)
    accepted = torch.empty_like(queues, dtype=torch.bool)
    accepted[order] = (place < capacity) & (queues >= 0)
    return accepted.view_as(indices)


def capacity_margins(
    indices: Tensor,
    weights: Tensor,
    sample_of_token: Tensor,
    position_of_token: Tensor,
    *,
    experts: int,
    capacity: int,
    policy: str,
) -> Tensor:
    """Returns how clear it is which assignments `within_capacity` keeps, fp32 [T, k], for the same arguments.

    The margin of an assignment is the gap between its weight and the nearest one on the other side of its expert's
    capacity, divided by its weight, beyond the step to which `within_capacity` rounds weights. Within this step a change
    of the last bit can decide, and the margin is the smallest number above 0. It is infinite where no weight decides:
    the expert has room for all, the policy is "position", or the index is -1.
    """
    order, queues = _queues(indices, weights, sample_of_token, position_of_token, experts, policy)
    first_dropped = torch.searchsorted(queues, queues) + capacity
    margins = torch.full_like(queues, float("inf"), dtype=torch.float32)
    if policy == "probs":
        ordered = weights.flatten()[order].float()
        is_kept = torch.arange(len(queues), device=queues.device) < first_dropped
        nearest = torch.where(is_kept, first_dropped, first_dropped - 1).clamp(max=len(queues) - 1)
        tiny = torch.finfo(torch.float32).tiny
        gaps = (ordered - ordered[nearest]).abs() / ordered.abs().clamp(min=tiny) - 2 / CAPACITY_STEPS
        is_full = torch.searchsorted(queues, queues, right=True) > first_dropped
        margins = torch.where(is_full & (queues >= 0), gaps.clamp(min=tiny), margins)
    return torch.empty_like(margins).index_copy_(0, order, margins).view_as(indices)


def _queues(
    indices: Tensor,
    weights: Tensor,
    sample_of_token: Tensor,
    position_of_token: Tensor,
    experts: int,
    policy: str,
) -> tuple[Tensor, Tensor]:
    """Returns the order of all assignments by sample, expert and preference, [T k], and sample x E + expert of each in
    this order, or -1."""
    topk = indices.shape[1]
    by_position = position_of_token.argsort()
    order = (by_position.unsqueeze(-1) * topk + torch.arange(topk, device=indices.device)).flatten()
    if policy == "probs":
        # Equal tokens with an equal past, such as repeated ones, have equal weights but for rounding, which differs
        # between layouts and must not decide; the position does.
        fractions, exponents = torch.frexp(weights.flatten()[order])
        comparable = torch.ldexp((fractions * CAPACITY_STEPS).round(), exponents)
        order = order[comparable.argsort(descending=True, stable=True)]
    wanted = torch.where(indices >= 0, sample_of_token.unsqueeze(-1) * experts + indices, -1).flatten()
    order = order[wanted[order].argsort(stable=True)]
    return order, wanted[order]


def _group_scores(grouped: Tensor, rule: RouterSpec) -> Tensor:
    """[T, G, E/G] -> [T, G]."""
    if rule.group_score == "max":
        return grouped.amax(dim=-1)
    best = grouped.topk(rule.topk // rule.group_topk, dim=-1).values
    return functools.reduce(operator.add, best.unbind(-1))  # one by one: torch's sum may depend on the number of tokens
