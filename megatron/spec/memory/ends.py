"""The memory of the two ends of the model, event by event: the embedding, and final norm, output layer and loss."""

from __future__ import annotations

import dataclasses

from megatron.spec.decoder import DecoderSpec, EmbeddingSpec
from megatron.spec.memory.linear import LinearMemory
from megatron.spec.memory.norm import NormMemory
from megatron.spec.memory.trace import (
    BACKWARD,
    COMMUNICATION,
    DROPOUT,
    EMBEDDING,
    LOGITS,
    NORMS,
    RESIDUAL,
    WORK,
    MemoryTrace,
)
from megatron.spec.sizes import FP32, INT64, MASK, Sizes
from megatron.spec.work_space import CROSS_ENTROPY_BLOCK


class EmbeddingMemory:
    """Token ids to the residual stream."""

    def __init__(self, spec: EmbeddingSpec, sizes: Sizes) -> None:
        self._sizes = sizes
        self._words = spec.words.numel // sizes.tp
        self._positions = 0 if spec.positions is None else spec.positions.numel * sizes.e
        self._dropout, self._multiplied = spec.dropout > 0, spec.multiplier != 1
        self._local_ids = sizes.tokens * (INT64 + MASK) if sizes.tp > 1 else 0

    def forward(self, trace: MemoryTrace) -> None:
        """Leaves the residual stream."""
        sizes = self._sizes
        trace.take(EMBEDDING, self._local_ids)
        trace.take(WORK, sizes.whole)
        if sizes.sp > 1:
            trace.take(WORK, sizes.hidden)
            trace.use(COMMUNICATION, sizes.whole if sizes.target.cpu else 0)
            trace.free(WORK, sizes.whole)
        elif sizes.tp > 1:
            trace.use(WORK, sizes.whole)  # summed in a copy
        if self._multiplied:
            trace.use(WORK, sizes.hidden)
        if self._positions:
            trace.use(WORK, sizes.hidden + sizes.hidden // sizes.b)
        trace.take(RESIDUAL, sizes.residual)
        if sizes.residual == sizes.hidden:
            trace.free(WORK, sizes.hidden)
        if self._dropout:
            trace.take(DROPOUT, self._mask)
            trace.use(WORK, sizes.residual)
        if sizes.residual != sizes.hidden:
            trace.free(WORK, sizes.hidden)

    def backward(self, trace: MemoryTrace) -> None:
        """Frees the gradient of the residual stream."""
        sizes = self._sizes
        if self._dropout:
            trace.use(BACKWARD, sizes.residual)
            trace.free(DROPOUT, self._mask)
        trace.use(WORK, self._positions)
        around = (sizes.hidden if self._multiplied or sizes.residual != sizes.hidden else 0) + (
            sizes.whole if sizes.sp > 1 else 0
        )
        masked = sizes.whole if sizes.tp > 1 else 0
        fp32 = sizes.whole // sizes.e * FP32 if sizes.target.cpu and sizes.e < FP32 else 0
        trace.use(WORK, around + masked + sizes.grad_sum(self._words) + max(fp32, sizes.grad_bits(self._words)))
        trace.free(EMBEDDING, self._local_ids)
        trace.free(BACKWARD, sizes.residual)

    @property
    def _mask(self) -> int:
        sizes = self._sizes
        return sizes.rows * sizes.h * (sizes.r if sizes.target.cpu else MASK)


class HeadMemory:
    """The residual stream to the loss. Head and loss are computed in backward, for a chunk of tokens at a time
    (core/tensor_parallel/chunked_loss.py): the logits are one tensor, into which their gradient is written."""

    def __init__(self, spec: DecoderSpec, sizes: Sizes) -> None:
        self._sizes = sizes
        self._norm = NormMemory(spec.final_norm, sizes)
        self._chunk = chunk = dataclasses.replace(
            sizes,
            s=sizes.chunk_length(sizes.loss_chunk),
            fp8=None,
            split_backward=sizes.split_backward and not self._in_chunks,
        )
        self._output = LinearMemory(spec.output, chunk, (NORMS, LOGITS))
        self._kept = chunk.tokens * ((INT64 if sizes.b > 1 else 0) + FP32)  # targets; log-sum-exp
        vocabulary, block = self._output.outputs, CROSS_ENTROPY_BLOCK["cpu" if sizes.target.cpu else "cuda"]
        rows = max(1, min(chunk.tokens, block // max(1, vocabulary)))
        self._block = 0 if sizes.target.fused else rows * vocabulary * FP32
        self._slope = 0 if spec.logits_softcap is None else self._block

    @property
    def _in_chunks(self) -> bool:
        return self._sizes.chunk_length(self._sizes.loss_chunk) < self._sizes.s

    def forward(self, trace: MemoryTrace) -> None:
        """Leaves the normalized residual stream."""
        with trace.doing("norm"):
            self._norm.forward(trace)
        if self._norm.copies:
            trace.free(RESIDUAL, self._sizes.residual)

    def backward(self, trace: MemoryTrace) -> None:
        """Leaves the gradient of the residual stream."""
        sizes = self._sizes
        if self._in_chunks:
            trace.take(BACKWARD, sizes.hidden)
            self._head(trace)
            # The chunk's own gradient has been copied, and its hidden states are a part of all.
            trace.free(BACKWARD, self._chunk.hidden)
            trace.free(NORMS, sizes.hidden - self._chunk.hidden)
        else:
            self._head(trace)
        with trace.doing("norm"):
            self._norm.backward(trace)
        if not self._norm.copies:
            trace.free(RESIDUAL, sizes.residual)

    def _head(self, trace: MemoryTrace) -> None:
        """The logits of a chunk, their loss, and the gradient of its hidden states."""
        tokens = self._chunk.tokens
        copied = tokens * (INT64 + FP32) if self._sizes.sp > 1 and self._in_chunks else 0  # targets, gradients
        with trace.doing("logits"):
            trace.take(LOGITS, copied)
            self._output.forward(trace)
        half = self._sizes.e < FP32
        with trace.doing("loss"):
            trace.take(LOGITS, self._kept)
            trace.use(WORK, self._block * (2 if half else 1) + tokens * (INT64 + MASK + 4 * FP32))
            wide, narrowed = (self._block, self._block // FP32 * self._sizes.e) if half else (0, 0)
            trace.use(WORK, wide + max(narrowed, self._slope) + tokens * (INT64 + MASK + FP32))
            trace.free(LOGITS, self._kept + self._output.out)
            trace.take(BACKWARD, self._output.out)
        with trace.doing("gradient of the logits"):
            self._output.backward(trace)
        trace.free(LOGITS, copied)
