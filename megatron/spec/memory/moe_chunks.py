"""The memory of a layer with experts that computes some tokens at a time, event by event."""

from __future__ import annotations

from collections.abc import Callable

from megatron.config.recompute import WHOLE_MOE
from megatron.spec.memory.exchange import ExchangeMemory
from megatron.spec.memory.experts import ExpertsMemory
from megatron.spec.memory.moe import RouterMemory, SharedMemory
from megatron.spec.memory.norm import BeforeMemory
from megatron.spec.memory.trace import BACKWARD, MLP, ROUTER, ROUTING, WORK, MemoryTrace, Profile, profile_of
from megatron.spec.moe import MoESpec
from megatron.spec.sizes import FP32, Sizes


class ChunkedMoEMemory:
    """As MoEMemory, for several chunks: the router chooses for all tokens, and the exchange, the experts and the shared
    experts of a chunk are computed again in its backward. The plans of all chunks are kept until then."""

    def __init__(self, spec: MoESpec, sizes: Sizes, norm: BeforeMemory, modules: frozenset[str]) -> None:
        chunk = sizes.chunk(sizes.mlp_chunk)
        assert sizes.load is not None and chunk.load is not None
        self._sizes, self._chunk, self._norm, self._recompute = sizes, chunk, norm, WHOLE_MOE in modules
        self._router = RouterMemory(spec.router, sizes)
        self._plans = ExchangeMemory(sizes, sizes.load).plan
        self._weights = sizes.rows * spec.router.topk * FP32
        self._exchange = ExchangeMemory(chunk, chunk.load)
        self._experts = ExpertsMemory(spec.experts, chunk, chunk.load, recompute_act=False)
        # The first run keeps nothing, and so frees what the shared experts would keep; the second one keeps it.
        self._shared_once: SharedMemory | None = None
        self._shared: SharedMemory | None = None
        if spec.shared is not None:
            gate = spec.shared_gate is not None
            self._shared_once, self._shared = (
                SharedMemory(spec.shared, chunk, norm.kind, gate=gate, recompute=recompute)
                for recompute in (True, False)
            )
        self.keeps_stream = norm.keeps_stream
        self.frees_gradient = False  # for its plan to be an upper bound where the backward is split

    def forward(self, trace: MemoryTrace) -> None:
        """See MoEMemory."""
        self._norm.forward(trace)
        self._route(trace)
        trace.take(ROUTING, self._router.choices + self._plans, ROUTING)
        trace.take(WORK, self._sizes.hidden)  # the output
        trace.replay(_peak_of(self._forward_of_chunk))
        if self._recompute:
            self._forget_router(trace)

    def backward(self, trace: MemoryTrace, grad: int) -> None:
        """See MoEMemory."""
        sizes = self._sizes
        if self._recompute:
            self._route(trace)
            trace.use(WORK, sizes.hidden)  # the output, whose values are undefined
        trace.take(BACKWARD, sizes.hidden + self._weights)
        trace.replay(_peak_of(self._backward_of_chunk))
        self._router.backward(trace)
        trace.free(BACKWARD, self._weights)
        trace.free(MLP, self._weights)
        trace.free(ROUTING, self._router.choices + self._plans)
        trace.free(BACKWARD, grad)
        # The gradient of the router's weight reads it later, or the router's copy of it.
        needed = sizes.split_backward and not self._router.copies
        trace.free(self._norm.kind, 0 if needed else sizes.hidden)
        self._norm.backward(trace)

    def _route(self, trace: MemoryTrace) -> None:
        self._router.forward(trace)
        trace.take(MLP, self._weights, ROUTER)

    def _forget_router(self, trace: MemoryTrace) -> None:
        """Frees all that the router keeps but the choices."""
        kept = profile_of(self._route).net[MLP]
        trace.free(MLP, kept, ROUTER)

    def _forward_of_chunk(self, trace: MemoryTrace) -> None:
        """From the routed tokens to the results of a chunk."""
        self._exchange.start(trace)
        if self._shared_once is not None:
            self._shared_once.forward(trace)
        self._exchange.finish(trace)
        experts = profile_of(self._experts.forward)
        trace.replay(experts)
        trace.free(MLP, experts.net[MLP])
        self._exchange.combine(trace)
        trace.use(WORK, self._chunk.hidden if self._shared is not None else 0)  # both results and their sum

    def _backward_of_chunk(self, trace: MemoryTrace) -> None:
        """The second run of a chunk, and its backward. The gradient of its output is a part of the whole one."""
        chunk, exchange, shared = self._chunk, self._exchange, self._shared
        exchange.start(trace)
        if shared is not None:
            shared.forward(trace)
        exchange.finish(trace)
        self._experts.forward(trace, product=False)
        if not exchange.alone:
            trace.take(WORK, chunk.hidden)
        trace.use(WORK, chunk.hidden if shared is not None else 0)
        trace.free(WORK, 0 if exchange.alone else self._experts.sums)
        trace.free(WORK, chunk.hidden if shared is not None else 0)  # one result stays, whose values are undefined
        sums = exchange.combine_backward(trace)
        self._experts.backward(trace)
        trace.free(BACKWARD, sums)
        exchange.finish_backward(trace)
        if shared is not None:
            shared.backward(trace, 0)
            trace.take(self._norm.kind, shared.kept_input)  # a part of the input of all tokens, which stays
        exchange.start_backward(trace)


def _peak_of(work: Callable[[MemoryTrace], None]) -> Profile:
    """Returns the profile of work on one chunk, of which nothing is left."""
    return Profile({}, profile_of(work).top, "", {})
