"""The router: scores the experts for each token, and chooses some of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.moe_training import GLOBAL_AUX, SINKHORN
from megatron.core.comm.collectives import all_gather
from megatron.core.parameter import Parameter, deliver
from megatron.core.transformer.context import Build
from megatron.core.transformer.moe.balance import weights
from megatron.core.transformer.moe.microbatch import MicrobatchRouting
from megatron.kernels.ops import routing as kernels
from megatron.kernels.ops.routing import Routed
from megatron.kernels.ops.weight_grad import fused
from megatron.spec.moe import EXPERT_BIAS, RouterSpec

PREVIOUS_LOAD = "previous_load"  # name of the buffer


class Router(nn.Module):
    """[T, h] -> (experts [T, k] int64, with -1 where an assignment is dropped; their weights [T, k], fp32).

    T = s x b tokens of this rank, the samples varying fastest. Logits, scores and weights are at least fp32 whatever
    the dtype of the model. Buffers, which a change of the model's dtype leaves as they are: expert_bias [E] fp32, where
    the choice has one, and previous_load [E] int64, assignments in the global batch before.
    """

    def __init__(self, build: Build, spec: RouterSpec, number: int) -> None:
        """number: of the layer in the whole model, from 0."""
        super().__init__()
        self.weight = build.parameter(spec.weight)
        self.bias = None if spec.bias is None else build.parameter(spec.bias)
        self.spec, self.number, self.groups, self._moe = spec, number, build.groups, build.moe
        self.kernels = build.kernels.experts.router
        bias = torch.zeros(spec.experts, device=build.device) if spec.has_bias else None
        self.register_buffer(EXPERT_BIAS, bias)
        load = torch.zeros(spec.experts, dtype=torch.int64, device=build.device)
        self.register_buffer(PREVIOUS_LOAD, load)
        self.expert_bias: Tensor | None
        self.previous_load: Tensor

    def forward(self, x: Tensor, samples: int, routing: MicrobatchRouting | None) -> tuple[Tensor, Tensor]:
        """samples: b. routing: of this microbatch, made here in the first run of training; generation has none.

        Communication: that of `MicrobatchRouting.record`; where a sample is sharded, an all-gather over tp x cp: of
        experts and weights with --moe-expert-capacity-factor, and of logits with sinkhorn balancing.
        """
        indices, expert_weights = _Route.apply(x, self.weight, self.bias, _Call(self, samples, routing))
        return indices, expert_weights

    def leaves_out(self, routing: MicrobatchRouting | None) -> bool:
        """Whether assignments may be left out of this microbatch:
        of tokens that are not routed, or beyond the capacity."""
        if routing is None:
            return False
        return routing.routed is not None or self._has_capacity(routing)

    def _has_capacity(self, routing: MicrobatchRouting) -> bool:
        return self._moe.moe_expert_capacity_factor is not None and routing.length is not None

    def choice(self, logits: Tensor, samples: int, routing: MicrobatchRouting | None) -> Tensor | None:
        """The choice [T, k] for this microbatch, if it is not the highest scores of a token: that of the first run, a
        forced one, or a balanced one.
        """
        if routing is not None and self.number in routing.layers:
            return routing.layers[self.number].chosen
        if routing is not None and self.number in routing.forced:
            return routing.forced[self.number].long()
        if self._moe.moe_router_force_load_balancing:
            if routing is None:
                return kernels.balanced_choice(torch.arange(len(logits), device=logits.device), self.spec)
            return kernels.balanced_choice(routing.places.repeat_interleave(samples), self.spec)
        if SINKHORN in self._moe.moe_router_load_balancing_type and routing is not None and routing.losses is not None:
            return self._sinkhorn_choice(logits, samples, routing)
        return None

    def _sinkhorn_choice(self, logits: Tensor, samples: int, routing: MicrobatchRouting) -> Tensor:
        """The balanced choice [T, k] over the whole microbatch, decided alike on all ranks that share its samples."""
        group, rows = self.groups.tp_cp, len(logits)
        everywhere = all_gather(logits, group)
        routed = None if routing.routed is None else all_gather(routing.routed.flatten(), group)
        order = all_gather(routing.places, group).repeat_interleave(samples).argsort(stable=True)
        in_order = kernels.sinkhorn_choice(everywhere[order], None if routed is None else routed[order], self.spec.topk)
        chosen = torch.empty_like(in_order)
        chosen[order] = in_order
        return chosen[group.rank * rows : (group.rank + 1) * rows]

    def record(self, logits: Tensor, routed: Routed, samples: int, routing: MicrobatchRouting | None) -> Tensor | None:
        """Keeps the choice of a first run. Returns the assignments that are kept [T, k], or None if all are."""
        if routing is not None and self.number in routing.layers:
            return routing.layers[self.number].accepted
        chosen = routed.chosen
        accepted = self._accepted(routed, samples, routing)
        if routing is not None and routing.choices is not None:
            routing.choices[self.number] = chosen.to(torch.int16)
        if routing is None or routing.losses is None:
            return accepted
        load = self._counts(chosen, samples, routing)
        counts = load
        if routing.losses.counts_samples and (self.spec.has_bias or self.spec.groups > 1):
            counts = self._counts(kernels.highest(routed.scores, self.spec.topk), samples, routing)
        if accepted is not None and self.spec.has_bias:
            load = self._counts(chosen.masked_fill(~accepted, -1), samples, routing)
        sums = self._sums(logits, routed.scores, samples, routing) if routing.losses.names else None
        layer = routing.record(self.number, chosen, accepted, load.sum(0), counts, sums, self.groups.tp_cp)
        if routing.is_traced:
            candidates = logits if self.spec.by_logits else routed.scores
            layer.margins = kernels.margins(candidates, self.expert_bias, self.spec)
            if self._has_capacity(routing):
                assert accepted is not None
                of_capacity = self._by_capacity(kernels.capacity_margins, routed, samples, routing)
                layer.capacity_margins = torch.where(accepted, of_capacity, -of_capacity)
        return accepted

    def _counts(self, chosen: Tensor, samples: int, routing: MicrobatchRouting) -> Tensor:
        """Assignments of this rank's tokens of each sample that are no padding, int64 [b, E]."""
        of_sample = torch.arange(len(chosen), device=chosen.device) % samples
        counted = chosen if routing.routed is None else chosen.masked_fill(~routing.routed.reshape(-1, 1), -1)
        return kernels.counts_by_sample(counted, of_sample, samples, self.spec.experts)

    def _accepted(self, choice: Routed, samples: int, routing: MicrobatchRouting | None) -> Tensor | None:
        """Assignments of tokens that are routed, to experts that have room for them; None if all are."""
        if routing is None or not self.leaves_out(routing):
            return None
        if self._has_capacity(routing):
            if self.number not in routing.forced_accepted:
                return self._by_capacity(kernels.within_capacity, choice, samples, routing)
            accepted = routing.forced_accepted[self.number]
        else:
            accepted = torch.ones_like(choice.chosen, dtype=torch.bool)
        return accepted if routing.routed is None else accepted & routing.routed.reshape(-1, 1)

    def _by_capacity(
        self, of_queues: Callable[..., Tensor], choice: Routed, samples: int, routing: MicrobatchRouting
    ) -> Tensor:
        """Returns `kernels.within_capacity` or `kernels.capacity_margins` of this rank's assignments, [T, k].

        Decided over whole samples, alike on all ranks that share them.
        """
        moe, spec, group, rows = self._moe, self.spec, self.groups.tp_cp, len(choice.chosen)
        assert moe.moe_expert_capacity_factor is not None and routing.length is not None
        chosen = choice.chosen
        if routing.routed is not None:
            chosen = chosen.masked_fill(~routing.routed.reshape(-1, 1), -1)
        experts = all_gather(chosen, group)
        whole = of_queues(
            experts,
            all_gather(choice.weights.float().contiguous(), group),
            torch.arange(len(experts), device=chosen.device) % samples,
            all_gather(routing.places, group).repeat_interleave(samples),
            experts=spec.experts,
            capacity=math.ceil(moe.moe_expert_capacity_factor * routing.length * spec.topk / spec.experts),
            policy=moe.moe_token_drop_policy,
        )
        return whole[group.rank * rows : (group.rank + 1) * rows]

    def _sums(self, logits: Tensor, scores: Tensor, samples: int, routing: MicrobatchRouting) -> tuple[Tensor, Tensor]:
        """Probabilities and squared log-sum-exps of this rank's tokens of each sample, for the values of the losses."""
        probabilities, squares = kernels.probabilities_of(scores, self.spec), logits.logsumexp(1).square()
        if routing.routed is not None:
            routed = routing.routed.reshape(-1)
            probabilities, squares = probabilities * routed.unsqueeze(1), squares * routed
        return probabilities.view(-1, samples, self.spec.experts).sum(0), squares.view(-1, samples).sum(0)


@dataclass(frozen=True)
class _Call:
    """The arguments of one call that are no tensors."""

    router: Router
    samples: int
    routing: MicrobatchRouting | None


class _Route(torch.autograd.Function):
    """(x, weight, bias, call) -> (experts, weights).

    Keeps x, the logits and the choice; backward computes the scores again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Parameter, bias: Parameter | None, call: _Call) -> tuple[Tensor, Tensor]:
        spec, dtype = call.router.spec, _dtype(call.router.spec)
        router = call.router
        logits = router.kernels.logits(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        choice = router.choice(logits, call.samples, call.routing)
        routed = router.kernels.route(logits, router.expert_bias, spec, choice)
        accepted = router.record(logits, routed, call.samples, call.routing)
        ctx.save_for_backward(x, logits, routed.chosen, accepted)
        ctx.weight, ctx.bias, ctx.call = weight, bias, call
        indices = chosen = routed.chosen
        expert_weights = routed.weights.float()
        if accepted is not None:
            indices, expert_weights = chosen.masked_fill(~accepted, -1), expert_weights * accepted
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)  # no zeros for the indices
        return indices, expert_weights

    @staticmethod
    def backward(ctx: Any, _: None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        x, logits, chosen, accepted = ctx.saved_tensors
        if grad is None:  # no result has used the weights
            grad = logits.new_zeros(chosen.shape, dtype=torch.float32)
        call: _Call = ctx.call
        gradient = _gradient_of_logits(logits, chosen, accepted, grad, call)
        weight: Parameter = ctx.weight
        grad_x = (gradient @ weight.to(gradient.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = _deliver(weight, gradient.float(), x) if ctx.needs_input_grad[1] else None
        grad_bias = deliver(ctx.bias, gradient.float().sum(0)) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None


def _gradient_of_logits(logits: Tensor, chosen: Tensor, accepted: Tensor | None, grad: Tensor, call: _Call) -> Tensor:
    router, routing = call.router, call.routing
    prices = z_weight = routed = None
    if routing is not None and routing.losses is not None:
        routed = None if routing.routed is None else routing.routed.reshape(-1)
        if routing.losses.kinds:
            prices = routing.prices(router.number, router.previous_load).to(logits.dtype)
        if routing.losses.z:
            assert routing.tokens is not None
            z_weight = weights(GLOBAL_AUX, routing.tokens)[0] * routing.losses.z * routing.scale
            z_weight = z_weight.to(logits.dtype)
    return router.kernels.gradient(
        logits,
        chosen,
        grad if accepted is None else grad * accepted,
        router.spec,
        prices=prices,
        z_weight=z_weight,
        routed=routed,
    )


def _deliver(weight: Parameter, grad: Tensor, x: Tensor) -> Tensor | None:
    """Accumulates the weight's gradient into its slot, or returns it where no bucket owns it. fp32 in any case."""
    slot = weight.slot
    if slot is None:
        return (grad.t() @ x.float()).to(weight.dtype)
    slot.write(lambda main_grad, overwrite: fused(main_grad, grad, x.float(), overwrite))
    return None


def _dtype(spec: RouterSpec) -> torch.dtype:
    return torch.float64 if spec.dtype == "fp64" else torch.float32
