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
        trace.use(WORK, around + masked + fp32)
        trace.free(EMBEDDING, self._local_ids)
        trace.free(BACKWARD, sizes.residual)

    @property
    def _mask(self) -> int:
        sizes = self._sizes
        return sizes.rows * sizes.h * (sizes.r if sizes.target.cpu else MASK)


class HeadMemory:
    """The residual stream to the loss."""

    def __init__(self, spec: DecoderSpec, sizes: Sizes) -> None:
        self._sizes = sizes
        self._norm = NormMemory(spec.final_norm, sizes)
        self._output = LinearMemory(spec.output, dataclasses.replace(sizes, fp8=None), (NORMS, LOGITS))
        self._kept = sizes.tokens * ((INT64 if sizes.b > 1 else 0) + FP32)  # targets; log-sum-exp
        vocabulary, block = self._output.outputs, CROSS_ENTROPY_BLOCK["cpu" if sizes.target.cpu else "cuda"]
        rows = max(1, min(sizes.tokens, block // max(1, vocabulary)))
        self._block = 0 if sizes.target.fused else rows * vocabulary * FP32
        self._slope = 0 if spec.logits_softcap is None else self._block

    def forward(self, trace: MemoryTrace) -> None:
        """The logits are one tensor, into which backward writes their gradient."""
        half = self._sizes.e < FP32
        with trace.doing("norm"):
            self._norm.forward(trace)
        if self._norm.copies:
            trace.free(RESIDUAL, self._sizes.residual)
        with trace.doing("logits"):
            self._output.forward(trace)
        with trace.doing("loss"):
            trace.take(LOGITS, self._kept)
            trace.use(WORK, self._block * (2 if half else 1) + self._sizes.tokens * (INT64 + MASK + 4 * FP32))

    def backward(self, trace: MemoryTrace) -> None:
        """Leaves the gradient of the residual stream."""
        sizes = self._sizes
        with trace.doing("loss"):
            wide, narrowed = (self._block, self._block // FP32 * sizes.e) if sizes.e < FP32 else (0, 0)
            copies = wide + max(narrowed, self._slope)
            trace.use(WORK, copies + sizes.tokens * (INT64 + MASK + FP32))
            trace.free(LOGITS, self._kept + self._output.out)
            trace.take(BACKWARD, self._output.out)
        with trace.doing("gradient of the logits"):
            self._output.backward(trace)
        with trace.doing("norm"):
            self._norm.backward(trace)
        if not self._norm.copies:
            trace.free(RESIDUAL, sizes.residual)
