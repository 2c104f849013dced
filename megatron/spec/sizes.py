"""The size of a microbatch on one rank, and what decides how many copies of it its layers make."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from megatron.spec.expert_rows import ExpertRows
from megatron.spec.fp8_sizes import Fp8Sizes
from megatron.spec.lora import LoraSpec
from megatron.spec.work_space import BITS_OF_COLUMNS, BITS_OF_ROWS, ROUNDED_AT_ONCE

FP32, INT32, INT64, MASK = 4, 4, 8, 1


@dataclass(frozen=True)
class Target:
    """The properties of a device's kernels that decide about memory.

    cpu: kernels of the CPU; else of a CUDA device. wide: GEMMs of half-precision matrices run on fp32 copies, as on
    CPUs without instructions for them (kernels/ops/gemm.py). fused: norms, gated activations and the loss are one
    kernel each way (kernels/fused.py), without copies in fp32.
    """

    cpu: bool
    wide: bool = False
    fused: bool = False


FUSED_GPU = Target(cpu=False, fused=True)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One microbatch on one rank of `tp` x `cp`.

    s, b: sequence and samples as a rank holds them. h: hidden size. e, r: bytes per element of an activation and of the
    residual stream. sp: parts that sequence parallelism divides the sequence into, tp or 1. comm_type: how attention
    reads the whole sequence where cp > 1, with cp_inner ranks that exchange heads under a2a+p2p. unfused_attention:
    plain torch, not a fused kernel. documents: samples hold several, and attention stays inside of each.
    fused_weight_grad: a weight's gradient is accumulated by its GEMM. split_backward: weight gradients are computed
    later than input gradients. rounds_grads: whole gradients are kept in bf16, so that their sums are computed in fp32
    copies. loss_chunk, mlp_chunk: tokens for which the head, and a recomputed MLP or mixture of experts, are computed
    at once, None for all. predictions: of further tokens. load: the rows of every layer with experts.
    sinkhorn: their choices are balanced over the microbatch. fp8: sizes of the FP8 products of linear layers, None
    without. lora: the adapters, with which all weights are frozen, None without.
    """

    target: Target
    s: int
    b: int
    h: int
    e: int
    r: int
    tp: int = 1
    sp: int = 1
    cp: int = 1
    comm_type: str = "p2p"
    cp_inner: int = 1
    unfused_attention: bool = False
    documents: bool = False
    fused_weight_grad: bool = True
    split_backward: bool = False
    rounds_grads: bool = False
    loss_chunk: int | None = None
    mlp_chunk: int | None = None
    predictions: int = 0
    load: ExpertRows | None = None
    sinkhorn: bool = False
    fp8: Fp8Sizes | None = None
    lora: LoraSpec | None = None

    def of_layer(self, number: int) -> Sizes:
        """Returns the sizes of one layer: those without FP8 products have no `fp8`."""
        return self if self.fp8 is None or number in self.fp8.layers else dataclasses.replace(self, fp8=None)

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens of this rank's part of the microbatch."""
        return self.s * self.b

    def grad_sum(self, elements: int) -> int:
        """Returns the bytes of the fp32 copy in which the gradient of a weight with so many elements is summed."""
        return FP32 * elements if self.rounds_grads else 0

    def grad_bits(self, elements: int, *, in_columns: bool = False) -> int:
        """Returns the work space that rounds such a sum. in_columns: tp shards the columns of the weight, so that its
        elements are not one run of the global tensor."""
        block = min(elements, ROUNDED_AT_ONCE["cpu" if self.target.cpu else "cuda"])
        return block * (BITS_OF_COLUMNS if in_columns else BITS_OF_ROWS) if self.rounds_grads else 0

    def chunk_length(self, tokens: int | None) -> int:
        """Returns the positions of the sequence in a chunk of `tokens`, None for all: see TokenChunks in
        core/tensor_parallel/token_chunks.py."""
        return self.s if tokens is None else min(self.s, self.sp * max(1, tokens // (self.b * self.sp)))

    def chunk(self, tokens: int | None) -> Sizes:
        """Returns the sizes of a chunk of `tokens`, None for all. The gradients of the weights of several chunks are
        computed with those of the inputs."""
        length = self.chunk_length(tokens)
        if length == self.s:
            return self
        load = None if self.load is None else self.load.part(length, self.s)
        return dataclasses.replace(self, s=length, load=load, split_backward=False)

    @functools.cached_property
    def rows(self) -> int:
        """Tokens where sequence parallelism divides them."""
        return self.tokens // self.sp

    @functools.cached_property
    def hidden(self) -> int:
        """Bytes of hidden states between the layers' linear parts."""
        return self.rows * self.h * self.e

    @functools.cached_property
    def whole(self) -> int:
        """Bytes of hidden states, gathered over sequence parallelism."""
        return self.tokens * self.h * self.e

    @functools.cached_property
    def residual(self) -> int:
        """Bytes of the residual stream."""
        return self.rows * self.h * self.r
