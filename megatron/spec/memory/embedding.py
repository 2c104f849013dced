"""The memory of the embedding, event by event."""

from __future__ import annotations

from megatron.spec.decoder import EmbeddingSpec
from megatron.spec.memory.norm import row_statistics
from megatron.spec.memory.trace import BACKWARD, COMMUNICATION, DROPOUT, EMBEDDING, RESIDUAL, WORK, MemoryTrace
from megatron.spec.sizes import FP32, INT64, MASK, Sizes


class EmbeddingMemory:
    """Token ids to the residual stream."""

    def __init__(self, spec: EmbeddingSpec, sizes: Sizes) -> None:
        self._sizes = sizes
        self._words = spec.words.numel // sizes.tp
        self._positions = 0 if spec.positions is None else spec.positions.numel * sizes.e
        self._dropout, self._multiplied = spec.dropout > 0, spec.multiplier != 1
        # The norm keeps its input. With adapters it is frozen, as what is before it is.
        norm = spec.norm if sizes.lora is None else None
        self._normed = 0 if norm is None else sizes.hidden + sizes.rows * row_statistics(norm, sizes)
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
        trace.take(EMBEDDING, self._normed)
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
        if sizes.lora is not None:  # it is frozen, and autograd ends before it
            trace.free(EMBEDDING, self._local_ids)
            trace.free(BACKWARD, sizes.residual)
            return
        if self._dropout:
            trace.use(BACKWARD, sizes.residual)
            trace.free(DROPOUT, self._mask)
        grad = sizes.residual
        if self._normed:
            trace.take(BACKWARD, sizes.hidden)
            trace.free(EMBEDDING, self._normed)
            trace.free(BACKWARD, grad)
            grad = sizes.hidden
        trace.use(WORK, self._positions)
        around = (sizes.hidden if self._multiplied or sizes.residual != sizes.hidden else 0) + (
            sizes.whole if sizes.sp > 1 else 0
        )
        masked = sizes.whole if sizes.tp > 1 else 0
        fp32 = sizes.whole // sizes.e * FP32 if sizes.target.cpu and sizes.e < FP32 else 0
        trace.use(WORK, around + masked + sizes.grad_sum(self._words) + max(fp32, sizes.grad_bits(self._words)))
        trace.free(EMBEDDING, self._local_ids)
        trace.free(BACKWARD, grad)

    @property
    def _mask(self) -> int:
        sizes = self._sizes
        return sizes.rows * sizes.h * (sizes.r if sizes.target.cpu else MASK)
