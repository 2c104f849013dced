"""The memory of one decoder layer, event by event, in forward and in backward.

The events are those of core/transformer/block.py and of the autograd functions it calls, in their order: a tensor that
backward needs is taken in forward and freed when its node has run; the others are taken and freed within. Between
layers there is one tensor: in forward the residual stream, which belongs to the layer that made it; in backward its
gradient, which is in use when a layer's backward begins and when it ends.

[Note: bytes that a layer keeps] Per token, in bf16, with a fused kernel, without biases, dropout and adapters, a layer
with RMSNorm and a gated MLP keeps for its backward (h hidden, f MLP width, n query heads and as many key/value heads, n
d = h; over tp with sequence parallelism a tp-th of it):

    everything  16 h + 6 f + 8 + 4 n     bytes: residuals 2 x 2h, norms 2 x 2h, queries, keys and values 6h, output 2h,
                                         gate and up 4f, their product 2f, statistics 2 x 4, log-sum-exp 4n
    GEMM-last   12 h + 4 f + 4 n         without both norms' outputs and statistics and the activation's output
    full         2 h                     per group of layers

Not counted are parameters, rotary tables (one pair per microbatch for all layers), and the states of random streams
(some bytes per recomputed region on CUDA, 10 KB on the CPU).
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.config.recompute import CORE_ATTN, MLA_UP_PROJ, NORM
from megatron.spec.attention import AttentionSpec
from megatron.spec.decoder import LayerSpec
from megatron.spec.delta_net import DeltaNetSpec
from megatron.spec.latent_attention import LatentAttentionSpec
from megatron.spec.memory.attention import AttentionLayerMemory, AttentionMemory
from megatron.spec.memory.delta_net import DeltaNetMemory
from megatron.spec.memory.latent_attention import LatentMemory
from megatron.spec.memory.mlp import ChunkedMemory, DenseMemory
from megatron.spec.memory.moe import MoEMemory
from megatron.spec.memory.moe_chunks import ChunkedMoEMemory
from megatron.spec.memory.norm import (
    BeforeMemory,
    NoNormMemory,
    NormMemory,
    PostNormMemory,
    SharedNormMemory,
    linears_backward,
)
from megatron.spec.memory.trace import (
    ATTN_NORM,
    BACKWARD,
    COMMUNICATION,
    DROPOUT,
    MLP_FC1,
    MLP_NORM,
    PARTS,
    POST_ATTN_NORM,
    POST_MLP_NORM,
    QKV_LINEAR,
    RESIDUAL,
    ROUTER,
    ROUTING,
    SHARED_EXPERTS,
    WORK,
    MemoryTrace,
    Profile,
    profile_of,
)
from megatron.spec.moe import MoESpec
from megatron.spec.norm import NormSpec
from megatron.spec.sizes import MASK, Sizes


class LayerMemory:
    """One layer. modules: parts that are computed again in backward.

    norm and mlp_act are computed by the linear layer behind them, which keeps their input, and again within its
    backward. Before experts the norm is computed once.
    """

    def __init__(self, spec: LayerSpec, sizes: Sizes, modules: frozenset[str]) -> None:
        self._fused, self._parallel, self._shares_norm = sizes.target.fused, spec.parallel, spec.shares_norm
        self._sizes, self._dropout, self._multiplied = sizes, spec.dropout > 0, spec.residual_multiplier != 1
        deferred = NORM in modules
        self._input_norm = _before(spec.input_norm, sizes, ATTN_NORM, QKV_LINEAR, deferred=deferred)
        again, kind = CORE_ATTN in modules, self._input_norm.kind
        self._attention: AttentionLayerMemory | DeltaNetMemory
        match spec.attention:
            case DeltaNetSpec():
                self._attention = DeltaNetMemory(spec.attention, sizes, again=again, input_kind=kind)
            case LatentAttentionSpec():
                up_again = MLA_UP_PROJ in modules
                self._attention = LatentMemory(spec.attention, sizes, again=again, up_again=up_again, input_kind=kind)
            case AttentionSpec():
                self._attention = AttentionMemory(spec.attention, sizes, again=again, input_kind=kind)
        self._attention_norm = _behind(spec.post_attention_norm, sizes, POST_ATTN_NORM)
        self._mlp: DenseMemory | ChunkedMemory | MoEMemory | ChunkedMoEMemory
        if isinstance(spec.mlp, MoESpec):
            reader = SHARED_EXPERTS if spec.mlp.shared is not None else ROUTER
            self._pre_mlp_norm = _before(spec.pre_mlp_norm, sizes, MLP_NORM, reader, deferred=False)
            self._mlp = (
                MoEMemory(spec.mlp, sizes, self._pre_mlp_norm, modules)
                if sizes.chunk_length(sizes.mlp_chunk) == sizes.s
                else ChunkedMoEMemory(spec.mlp, sizes, self._pre_mlp_norm, modules)
            )
        else:
            self._pre_mlp_norm = (
                SharedNormMemory(sizes)
                if spec.shares_norm
                else _before(spec.pre_mlp_norm, sizes, MLP_NORM, MLP_FC1, deferred=deferred)
            )
            self._mlp = (
                DenseMemory(spec.mlp, sizes, self._pre_mlp_norm, modules)
                if sizes.mlp_chunk is None
                else ChunkedMemory(spec.mlp, sizes, self._pre_mlp_norm)
            )
        self._mlp_norm = _behind(spec.post_mlp_norm, sizes, POST_MLP_NORM)

    def forward(self, trace: MemoryTrace) -> None:
        """Leaves the tensors that backward needs, and the residual stream after the layer."""
        self._until_mlp(trace)
        sizes = self._sizes
        with trace.doing("mlp"):
            self._add(trace, self._mlp_norm, self._input_norm.part)  # of the next layer, as it is to this one
            trace.free(WORK, sizes.hidden)  # the MLP's output
        if self._parallel:
            trace.free(RESIDUAL, sizes.residual)  # the sum of the layer's input and the attention's output
            if self._input_norm.copies and not self._mlp.keeps_stream:
                trace.free(RESIDUAL, sizes.residual, self._input_norm.part)
        elif self._pre_mlp_norm.copies and not self._mlp.keeps_stream:
            trace.free(RESIDUAL, sizes.residual, self._pre_mlp_norm.part)
        if not self._fused:
            trace.free(WORK, sizes.hidden)  # the attention's output, which lives as long as the layer's function
            self._attention.end_layer(trace)

    def forward_again(self, trace: MemoryTrace) -> None:
        """As `forward`, of a second run that ends with this layer: behind the last tensor that backward needs."""
        self._until_mlp(trace)
        if self._mlp_norm is not None:
            with trace.doing("mlp"):
                self._mlp_norm.forward(trace)

    def _until_mlp(self, trace: MemoryTrace) -> None:
        """From the residual stream to the output of the MLP, which is left as work space, as is attention's, unless a
        fused kernel has added it."""
        sizes = self._sizes
        with trace.doing("attention"):
            self._input_norm.forward(trace)
            self._attention.project(trace)
            self._input_norm.forward_over(trace)
            self._attention.forward(trace)  # leaves its output
            self._add(trace, self._attention_norm, None if self._parallel else self._pre_mlp_norm.part)
            if self._fused:  # the sum is computed with its norm, and no function holds the output any more
                trace.use(WORK, sizes.hidden)
                trace.free(WORK, sizes.hidden)
                self._attention.end_layer(trace)
        if self._input_norm.copies and not self._parallel:
            trace.free(RESIDUAL, sizes.residual, self._input_norm.part)  # the layer's input, which nothing keeps
        with trace.doing("mlp"):
            self._mlp.forward(trace)

    def backward(self, trace: MemoryTrace, *, owned: bool = True) -> None:
        """Frees the tensors that forward kept, and the residual stream before the layer.

        owned: the incoming gradient is used nowhere else, so it is added to in place.
        """
        sizes = self._sizes
        trace.take(COMMUNICATION, self._attention.early)
        with trace.doing("mlp"):
            branch = self._branch_gradient(trace, self._mlp_norm)
            self._mlp.backward(trace, branch)
            if self._mlp.keeps_stream and not (self._parallel and self._input_norm.keeps_stream):
                trace.free(RESIDUAL, sizes.residual)
            if not self._parallel:  # else attention's branch reads the incoming gradient alone
                trace.free(BACKWARD, sizes.residual)
        # The weight gradients need the incoming gradient later. In a parallel layer that is attention's, too.
        waits = sizes.split_backward and branch == 0 and not self._mlp.frees_gradient
        if self._shares_norm:
            self._backward_to_shared_norm(trace, waits=waits, owned=owned)
            return
        if not owned or waits:
            trace.take(BACKWARD, 0 if waits and self._parallel else sizes.residual)
        with trace.doing("attention"):
            branch = self._branch_gradient(trace, self._attention_norm)
            if self._parallel and not waits:
                if branch:
                    trace.free(BACKWARD, sizes.residual)
                else:
                    branch = sizes.residual
            self._attention.backward(trace, grad=branch)
            self._input_norm.backward_behind(self._attention.readers, trace)
            if self._input_norm.keeps_stream:
                trace.free(RESIDUAL, sizes.residual)
            trace.free(BACKWARD, sizes.residual)
        if waits:
            trace.take(BACKWARD, 0 if self._parallel else sizes.residual)
            if not owned:
                trace.take(BACKWARD, sizes.residual)

    def _backward_to_shared_norm(self, trace: MemoryTrace, *, waits: bool, owned: bool) -> None:
        """The backward of attention, whose gradient of the norm's output is added to the MLP's, and of the norm, whose
        gradient is added to the incoming one."""
        sizes = self._sizes
        with trace.doing("attention"):
            self._attention.backward(trace, grad=self._branch_gradient(trace, self._attention_norm))
            linears_backward(self._attention.readers, trace)
            trace.free(BACKWARD, sizes.hidden)
            self._input_norm.backward(trace)
            if self._input_norm.keeps_stream:
                trace.free(RESIDUAL, sizes.residual)
            if waits or not owned:  # the sum has memory of its own
                trace.take(BACKWARD, sizes.residual)
            trace.free(BACKWARD, sizes.residual)
            if waits and not owned:
                trace.take(BACKWARD, sizes.residual)

    @property
    def core_saves_output(self) -> bool:
        """Whether attention itself, and not only the projection behind it, keeps the attention's output."""
        return self._attention.saves_output

    def kept_by_part(self) -> dict[str, int]:
        """Part of the layer -> bytes that it keeps for its backward; a storage counts where it is kept first."""
        parts = profile_of(self.forward).parts
        return {part: parts.get(part, 0) for part in PARTS}

    def _add(self, trace: MemoryTrace, norm: PostNormMemory | None, reader: str | None) -> None:
        """The branch's output, with its norm, factor and dropout, to the residual stream, which the part `reader`
        saves. The output stays."""
        sizes = self._sizes
        if norm is not None:
            norm.forward(trace)
        product = sizes.hidden if self._multiplied else 0
        trace.take(WORK, product)
        if self._dropout:
            trace.take(DROPOUT, self._mask, DROPOUT)
            trace.take(WORK, sizes.hidden)
        trace.take(RESIDUAL, sizes.residual, reader)
        if self._dropout:
            trace.free(WORK, sizes.hidden)
        trace.free(WORK, product)

    def _branch_gradient(self, trace: MemoryTrace, norm: PostNormMemory | None) -> int:
        """Bytes of the gradient of the branch's output; 0 when it is the residual stream's own."""
        added = self._added_gradient(trace)
        return added if norm is None else norm.backward(trace, added)

    def _added_gradient(self, trace: MemoryTrace) -> int:
        """Bytes of the gradient of what the branch adds to the residual stream; 0 when it is the stream's own."""
        sizes, nbytes = self._sizes, 0
        if sizes.residual != sizes.hidden:
            trace.take(BACKWARD, sizes.hidden)
            nbytes = sizes.hidden
        for applies, mask in ((self._dropout, self._mask), (self._multiplied, 0)):
            if applies:
                trace.take(BACKWARD, sizes.hidden)
                trace.free(DROPOUT, mask)
                trace.free(BACKWARD, nbytes)
                nbytes = sizes.hidden
        return nbytes

    @property
    def _mask(self) -> int:
        """Bytes that dropout of hidden states keeps. On the CPU torch has no kernel of its own for it: it keeps
        factors."""
        sizes = self._sizes
        return sizes.rows * sizes.h * (sizes.e if sizes.target.cpu else MASK)


def recomputed(layer: LayerMemory, forward: Profile, sizes: Sizes) -> tuple[Profile, dict[bool, Profile]]:
    """Returns what a layer that is recomputed whole does behind its `forward`, and in backward.

    First it frees all that the forward left behind except the output and the routing. Its second forward makes the
    rest; there are two of them, by whether the recomputed region ends with this layer. Both count the output, which
    the last layer of a region does not make, as left behind.
    """
    net = _without_routing(forward.net)
    freed = {**net, RESIDUAL: net[RESIDUAL] - sizes.residual}
    forget = Profile({kind: -size for kind, size in freed.items()}, {}, "", {})
    runs = {False: forward, True: profile_of(layer.forward_again)}
    return forget, {
        ends: Profile(net, _without_routing(run.top), run.moment, forward.parts) for ends, run in runs.items()
    }


def _without_routing(sums: Mapping[str, int]) -> dict[str, int]:
    return {kind: size for kind, size in sums.items() if kind != ROUTING}


def _before(norm: NormSpec | None, sizes: Sizes, part: str, linear: str, *, deferred: bool) -> BeforeMemory:
    """Between the residual stream and a linear layer. part, linear: the parts of the norm, and of the linear layer."""
    if norm is None:
        return NoNormMemory(sizes, linear)
    return NormMemory(norm, sizes, part, linear, deferred)


def _behind(norm: NormSpec | None, sizes: Sizes, part: str) -> PostNormMemory | None:
    return None if norm is None else PostNormMemory(norm, sizes, part)
