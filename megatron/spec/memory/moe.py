"""The memory of a layer's router and experts (core/transformer/moe), event by event.

The norm before them is computed once, and its output kept: the router reads it, the exchange and the shared experts.
The routing (choices, and the plan of the exchange) is kept until the layer's backward, whatever is computed again.

[Note: bytes that a layer with experts keeps]
Per token in bf16, with a gate and a balanced load: k of E experts have a token, each of width f, on D of the n ranks.

    rows received   2 D h    nothing at n = 1, where they are the norm's output
    output of fc1   4 k f
    activation      2 k f    nothing with moe_act
    logits          4 E
    weights         4 k
    routing         8 k for the choices, 36 k + 8 D for the plan of the exchange; 16 k at n = 1
"""

from __future__ import annotations

from megatron.config.recompute import MOE_ACT, WHOLE_MOE
from megatron.config.recompute import SHARED_EXPERTS as SHARED_AGAIN
from megatron.spec.memory.exchange import ExchangeMemory
from megatron.spec.memory.experts import ExpertsMemory
from megatron.spec.memory.mlp import MLPMemory
from megatron.spec.memory.norm import BeforeMemory
from megatron.spec.memory.trace import (
    BACKWARD,
    MLP,
    ROUTER,
    ROUTING,
    SHARED_EXPERTS,
    WORK,
    MemoryTrace,
    Profile,
    profile_of,
)
from megatron.spec.mlp import MLPSpec
from megatron.spec.moe import MoESpec, RouterSpec
from megatron.spec.sizes import FP32, INT64, Sizes

_FP64 = 8


class MoEMemory:
    """Shared experts, router and experts, and the norm before them. modules: parts that are computed again in
    backward."""

    def __init__(self, spec: MoESpec, sizes: Sizes, norm: BeforeMemory, modules: frozenset[str]) -> None:
        assert sizes.load is not None
        self._sizes, self._norm, self._recompute = sizes, norm, WHOLE_MOE in modules
        self._router = RouterMemory(spec.router, sizes)
        self._exchange = ExchangeMemory(sizes, sizes.load)
        self._experts = ExpertsMemory(spec.experts, sizes, sizes.load, recompute_act=MOE_ACT in modules)
        self._shared: SharedMemory | None = None
        if spec.shared is not None:
            gate = spec.shared_gate is not None
            self._shared = SharedMemory(spec.shared, sizes, norm.kind, gate=gate, recompute=SHARED_AGAIN in modules)
        self.keeps_stream = norm.keeps_stream
        # Whether all that a split backward leaves for later is made of other tensors than the gradient of the output.
        self.frees_gradient = not self._exchange.alone and (self._shared is None or spec.shared_gate is not None)

    def forward(self, trace: MemoryTrace) -> None:
        """From the residual stream to the sum of all experts' results, which is left as work space."""
        self._norm.forward(trace)
        profile = profile_of(self._forward)
        trace.replay(profile)
        if self._recompute:
            stays = {WORK, ROUTING}
            net, parts = (
                {key: -n for key, n in amounts.items() if key not in stays} for amounts in (profile.net, profile.parts)
            )
            trace.replay(Profile(net, {}, "", parts))

    def _forward(self, trace: MemoryTrace) -> None:
        sizes, shared = self._sizes, self._shared
        self._inner(trace, recompute=False)
        self._exchange.combine(trace)
        trace.use(WORK, sizes.hidden if shared is not None else 0)  # both results and their sum
        trace.free(WORK, 0 if self._exchange.alone else self._experts.sums)
        trace.free(WORK, sizes.hidden if shared is not None else 0)

    def backward(self, trace: MemoryTrace, grad: int) -> None:
        """From the gradient of the output, of `grad` bytes (0 when it belongs to another), to that of the residual
        stream, which takes its place."""
        hidden, split = self._sizes.hidden, self._sizes.split_backward
        if self._recompute:
            self._inner(trace, recompute=True)
            trace.free(WORK, hidden if self._shared is not None else 0)
        sums = self._exchange.combine_backward(trace)
        self._experts.backward(trace)
        trace.free(BACKWARD, 0 if split else sums)
        self._exchange.finish_backward(trace)
        read_by_router = 0
        if self._shared is not None:
            self._shared.backward(trace, grad)
            read_by_router = 0 if split else self._shared.kept_input
            trace.take(self._norm.kind, read_by_router)
        self._exchange.start_backward(trace)
        self._router.backward(trace)
        trace.free(ROUTING, self._router.choices + self._exchange.plan)
        if self._shared is not None:
            trace.free(self._norm.kind, read_by_router)
            trace.free(BACKWARD, hidden)  # added to the gradient of the router and the experts
        else:
            trace.free(BACKWARD, grad if self.frees_gradient or not split else 0)
            # Later the weights' gradients read it, or the router's copy of it.
            needed = split and (self._exchange.alone or not self._router.copies)
            trace.free(self._norm.kind, 0 if needed else hidden)
        self._norm.backward(trace)

    def _inner(self, trace: MemoryTrace, *, recompute: bool) -> None:
        """From the norm's output to the sums of this rank's experts, which a second run does not compute."""
        self._router.forward(trace)
        if not recompute:
            trace.take(ROUTING, self._router.choices, ROUTING)
            self._exchange.make_plan(trace)
        self._exchange.start(trace)
        if self._shared is not None:
            self._shared.forward(trace)
        self._exchange.finish(trace)
        self._experts.forward(trace, product=not recompute)
        trace.free(WORK, self._experts.sums if recompute else 0)


class RouterMemory:
    """From the tokens to the experts and weights of each."""

    def __init__(self, spec: RouterSpec, sizes: Sizes) -> None:
        self._spec, self._sizes = spec, sizes
        self._width = _FP64 if spec.dtype == "fp64" else FP32

    @property
    def copies(self) -> bool:
        """Whether it reads the tokens in a precision of its own."""
        return self._sizes.e != self._width

    @property
    def choices(self) -> int:
        """Bytes of the experts of each token."""
        return self._sizes.rows * self._spec.topk * INT64

    def forward(self, trace: MemoryTrace) -> None:
        """Leaves logits and weights, but for the choices."""
        sizes = self._sizes
        trace.take(WORK, self._widened)
        trace.take(MLP, self._scores, ROUTER)
        trace.free(WORK, self._widened)
        trace.use(WORK, self._scores * (4 if self._spec.groups == 1 else 5))  # scores, and integers in their order
        if sizes.sinkhorn:  # logits of all tokens, once more in their order; costs, weighed, sorted, and their places
            trace.use(WORK, sizes.tokens * sizes.cp * self._spec.experts * (2 * self._width + 4 * _FP64))

    def backward(self, trace: MemoryTrace) -> None:
        """Adds to the gradient of the tokens. Frees all that is kept, with the choices and the plan."""
        sizes = self._sizes
        trace.take(WORK, self._scores)  # gradient of the logits
        trace.use(WORK, 2 * self._scores)
        trace.take(WORK, self._widened)  # the tokens' gradient, and the weight; then the tokens
        trace.use(BACKWARD, sizes.hidden)
        trace.free(WORK, self._widened + self._scores)
        trace.free(MLP, self._scores)
        if sizes.split_backward:  # what its weight's gradient needs
            trace.take(BACKWARD, self._scores)
            trace.take(MLP, sizes.rows * sizes.h * self._width if self.copies else 0)

    @property
    def _scores(self) -> int:
        return self._sizes.rows * self._spec.experts * self._width

    @property
    def _widened(self) -> int:
        """Bytes of tokens and weight in the router's precision, where that is another."""
        sizes = self._sizes
        return (sizes.rows + self._spec.experts) * sizes.h * self._width if self.copies else 0


class SharedMemory:
    """The MLP that all tokens pass, and its gate. again: computed again in backward."""

    def __init__(self, spec: MLPSpec, sizes: Sizes, input_kind: str, *, gate: bool, recompute: bool) -> None:
        parts = (SHARED_EXPERTS, SHARED_EXPERTS)
        # Before a gate the output of fc2 is kept, too, so that nothing of the region is left out when it runs again.
        self._sizes, self._recompute, self._gate = sizes, recompute, gate
        self._mlp = MLPMemory(spec, sizes, recompute_act=False, recompute=recompute, input_kind=input_kind, parts=parts)
        self._gated = sizes.hidden + sizes.rows * sizes.e if gate else 0

    @property
    def kept_input(self) -> int:
        """Bytes of the norm's output, as fc1 keeps it."""
        return self._mlp.fc1.kept

    def forward(self, trace: MemoryTrace) -> None:
        """From the norm's output to theirs, which is left as work space."""
        self._mlp.fc1.forward(trace)
        self._mlp.forward(trace)
        trace.take(MLP, self._gated, SHARED_EXPERTS)
        trace.free(MLP, self._gated if self._recompute else 0, SHARED_EXPERTS)

    def backward(self, trace: MemoryTrace, grad: int) -> None:
        """As MLPMemory's, and then to the gradient of the input. Frees the input, `kept_input` bytes."""
        hidden, of_gate = self._sizes.hidden, self._sizes.hidden if self._gate else 0
        if self._recompute:
            self._mlp.fc1.forward(trace)
            self._mlp.activate(trace)
            trace.take(MLP, self._gated)
        if self._gate:
            trace.take(BACKWARD, hidden)
            trace.use(WORK, hidden)
            trace.free(MLP, self._gated)
            trace.take(BACKWARD, of_gate)
            trace.free(BACKWARD, grad)
            grad = hidden
        self._mlp.backward(trace, grad)
        self._mlp.fc1.backward(trace)
        trace.free(BACKWARD, of_gate)
