"""The mixture-of-experts layer, which stands in place of an MLP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatron.config.recompute import MOE_ACT, SHARED_EXPERTS
from megatron.core.expert_parallel.choose import choose_dispatcher
from megatron.core.streams.turns import Switch
from megatron.core.transformer.context import Build
from megatron.core.transformer.moe.experts import Experts
from megatron.core.transformer.moe.microbatch import MicrobatchRouting
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.shared import SharedExperts
from megatron.core.transformer.recompute import recompute_module
from megatron.spec.moe import MoESpec


class MoELayer(nn.Module):
    """[s or s/tp, b, h] -> the same: the sum over a token's experts of weight x expert(x), and the shared experts.

    Communication: that of the dispatcher (core/expert_parallel/dispatch.py), of the router,
    and of the shared experts' MLP.
    """

    def __init__(self, build: Build, spec: MoESpec, number: int, recomputed: frozenset[str]) -> None:
        """number: of the layer in the whole model, from 0. recomputed:
        parts of it that are computed again in backward."""
        super().__init__()
        self.router = Router(build, spec.router, number)
        self.experts = Experts(build, spec.experts, recompute_activation=MOE_ACT in recomputed)
        self.shared_experts = None if spec.shared is None else SharedExperts(build, spec.shared, spec.shared_gate)
        if self.shared_experts is not None and SHARED_EXPERTS in recomputed:
            # The gate's gradient needs the output of the last product.
            last = self.shared_experts.linear_fc2 if spec.shared_gate is None else None
            recompute_module(self.shared_experts, build.rng, last=last)
        self._dispatcher = choose_dispatcher(
            build.moe.moe_token_dispatcher_type,
            build.groups,
            spec.router.experts,
            f"layer {number}",
            build.kernels.experts.assign,
            build.read_counts,
            build.yield_turn,
            sequence_parallel=build.sequence_parallel,
            in_tree=build.kernels.experts.rows.in_tree,
        )
        self._number, self._skip_gemm = number, Switch()

    def forward(self, x: Tensor, routing: MicrobatchRouting | None = None) -> Tensor:
        """routing: of this microbatch, where it is kept: see Router."""
        rows = x.flatten(0, 1)
        indices, weights = self.router(rows, x.shape[1], routing)
        layer = None if routing is None else routing.layers.get(self._number)
        plan, whole = None if layer is None else layer.plan, not self.router.leaves_out(routing)
        on_the_way = self._dispatcher.start(rows, indices, weights, plan, whole=whole)
        # Behind the start, which overlaps them with the exchange, and before the experts, which then save the last
        # tensors: nothing after them is run again in a recomputed region.
        shared = None if self.shared_experts is None else self.shared_experts(x)
        sent = on_the_way.finish()
        if layer is not None:
            layer.plan = sent.plan
        out = self.experts(sent.rows, sent.weights, sent.assignments)
        total = torch.empty_like(x) if self._skip_gemm else self._dispatcher.combine(out, sent).view_as(x)
        return total if shared is None else total + shared

    @contextmanager
    def without_gemm(self) -> Iterator[None]:
        """In the body a call computes neither the experts' second product nor its way back: see SkipsLast."""
        with self._skip_gemm.on(), self.experts.without_gemm():
            yield
