"""The mixture-of-experts layer, which stands in place of an MLP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from megatron.config.recompute import MOE_ACT, SHARED_EXPERTS
from megatron.core.expert_parallel.choose import choose_dispatcher
from megatron.core.expert_parallel.plan import LocalPlan, Plan
from megatron.core.parameter import local_parameters
from megatron.core.streams.turns import Switch
from megatron.core.tensor_parallel.token_chunks import TokenChunks, run_in_chunks
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
    and of the shared experts' MLP. With chunks (`compute_in_chunks`) the first and the last once per chunk.
    """

    def __init__(self, build: Build, spec: MoESpec, number: int, recomputed: frozenset[str]) -> None:
        """number: of the layer in the whole model, from 0. recomputed:
        parts of it that are computed again in backward."""
        super().__init__()
        self.router = Router(build, spec.router, number)
        self.experts = Experts(build, spec.experts, recompute_activation=MOE_ACT in recomputed)
        self.shared_experts = None if spec.shared is None else SharedExperts(build, spec.shared, spec.shared_gate)
        # The gate's gradient needs the output of the last product.
        ungated = self.shared_experts is not None and spec.shared_gate is None
        self._last_shared = self.shared_experts.linear_fc2 if self.shared_experts is not None and ungated else None
        if self.shared_experts is not None and SHARED_EXPERTS in recomputed:
            recompute_module(self.shared_experts, build.rng, last=self._last_shared)
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
        self._shards = build.groups.tp.size if build.sequence_parallel else 1
        self._chunk: int | None = None

    def forward(self, x: Tensor, routing: MicrobatchRouting | None = None) -> Tensor:
        """routing: of this microbatch, where it is kept: see Router."""
        rows = x.flatten(0, 1)
        indices, weights = self.router(rows, x.shape[1], routing)
        layer = None if routing is None else routing.layers.get(self._number)
        whole = not self.router.leaves_out(routing)
        if self._chunk is not None and routing is not None:
            return self._in_chunks(self._chunk, x, indices, weights, whole=whole)
        out, plan = self._experts_of(x, indices, weights, None if layer is None else layer.plan, whole=whole)
        if layer is not None:
            layer.plan = plan
        return out

    def compute_in_chunks(self, tokens: int) -> None:
        """From now on exchanges and computes so many tokens of a microbatch at a time, and repeats each chunk in its
        backward.

        The router still chooses for all tokens at once. In generation, where ranks may have different numbers of
        tokens, all are computed at once.
        """
        self._chunk = tokens

    @contextmanager
    def without_gemm(self) -> Iterator[None]:
        """In the body a call computes neither the experts' second product nor its way back, or no expert at all where
        the backward repeats them anyway: see SkipsLast."""
        with self._skip_gemm.on(), self.experts.without_gemm():
            yield

    def _experts_of(
        self, x: Tensor, indices: Tensor, weights: Tensor, plan: LocalPlan | Plan | None, *, whole: bool
    ) -> tuple[Tensor, LocalPlan | Plan]:
        """Returns what the layer adds for x [c, b, h], whose experts and weights [c b, k] are those of the router, and
        the plan of the exchange, which is made unless it is there."""
        on_the_way = self._dispatcher.start(x.flatten(0, 1), indices, weights, plan, whole=whole)
        # Behind the start, which overlaps them with the exchange, and before the experts, which then save the last
        # tensors: nothing after them is run again in a recomputed region.
        shared = None if self.shared_experts is None else self.shared_experts(x)
        sent = on_the_way.finish()
        out = self.experts(sent.rows, sent.weights, sent.assignments)
        total = self._dispatcher.combine(out, sent, skip=bool(self._skip_gemm)).view_as(x)
        return total if shared is None else total + shared, sent.plan

    def _in_chunks(self, tokens: int, x: Tensor, indices: Tensor, weights: Tensor, *, whole: bool) -> Tensor:
        """As `_experts_of`. The plans of the first run serve the second one, so the host reads no counts there."""
        plans: dict[int, LocalPlan | Plan] = {}

        def compute(part: slice, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            out, plans[part.start] = self._experts_of(
                x, indices.flatten(0, 1), weights.flatten(0, 1), plans.get(part.start), whole=whole
            )
            return out

        def compute_again(*chunk: Any) -> Tensor:
            last = nullcontext() if self._last_shared is None else self._last_shared.without_gemm()
            with self.without_gemm(), last:
                return compute(*chunk)

        routed = [tensor.unflatten(0, x.shape[:2]) for tensor in (indices, weights)]
        parameters = [
            parameter
            for module in (self.experts, self.shared_experts)
            if module is not None
            for parameter in local_parameters(module).values()
        ]
        chunks = TokenChunks.of(tokens, x.shape[1], self._shards)
        skip = bool(self._skip_gemm)
        return run_in_chunks(compute, compute_again, parameters, [x, *routed], chunks, x.dtype, skip=skip)
