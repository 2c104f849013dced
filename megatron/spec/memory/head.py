"""The memory of the end of the model, event by event: final norm, output layer and loss, and further predictions."""

from __future__ import annotations

import dataclasses

from megatron.spec.decoder import DecoderSpec
from megatron.spec.memory.linear import LinearMemory
from megatron.spec.memory.norm import NormMemory
from megatron.spec.memory.prediction import PredictionMemory, rotary_tables
from megatron.spec.memory.trace import ATTENTION, BACKWARD, LOGITS, NORMS, RESIDUAL, WORK, MemoryTrace
from megatron.spec.sizes import FP32, INT64, MASK, Sizes
from megatron.spec.work_space import CROSS_ENTROPY_BLOCK


class HeadMemory:
    """The residual stream to the loss, with the predictions of further tokens, whose layers recompute `modules`, or all
    if it is `whole`.

    Head and loss are computed in backward, for a chunk of tokens at a time (core/tensor_parallel/chunked_loss.py): the
    logits are one tensor, into which their gradient is written.
    """

    def __init__(self, spec: DecoderSpec, sizes: Sizes, modules: frozenset[str], *, whole: bool) -> None:
        self._sizes = sizes
        self._norm = NormMemory(spec.final_norm, sizes)
        self._predictions = [PredictionMemory(spec, depth, sizes, modules, whole=whole) for depth in spec.predictions]
        self._rotary = rotary_tables(spec, sizes) if self._predictions else 0
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
        """Leaves the normalized residual stream, and what predictions keep."""
        with trace.doing("norm"):
            self._norm.forward(trace)
        if self._norm.copies:
            trace.free(RESIDUAL, self._sizes.residual)
        trace.take(ATTENTION, self._rotary)
        for prediction in self._predictions:
            with trace.doing("prediction"):
                prediction.forward(trace)

    def backward(self, trace: MemoryTrace) -> None:
        """Leaves the gradient of the residual stream."""
        sizes = self._sizes
        for further, prediction in enumerate(reversed(self._predictions)):
            self._loss(trace, others=further > 0)
            with trace.doing("prediction"):
                prediction.backward(trace)
        trace.free(ATTENTION, self._rotary)
        self._loss(trace, others=bool(self._predictions))
        with trace.doing("norm"):
            self._norm.backward(trace)
        if not self._norm.copies:
            trace.free(RESIDUAL, sizes.residual)

    def _loss(self, trace: MemoryTrace, *, others: bool) -> None:
        """From hidden states to their gradient. others: a prediction has left its part of that."""
        sizes = self._sizes
        if self._in_chunks:
            trace.take(BACKWARD, sizes.hidden)
            self._head(trace)
            # The chunk's own gradient has been copied, and its hidden states are a part of all.
            trace.free(BACKWARD, self._chunk.hidden)
            trace.free(NORMS, sizes.hidden - self._chunk.hidden)
        else:
            self._head(trace)
        trace.free(BACKWARD, sizes.hidden if others else 0)

    def losses(self, trace: MemoryTrace) -> None:
        """The losses of a chunk without gradients, from its logits, which are freed."""
        trace.take(LOGITS, self._copied)
        self._loss_of_chunk(trace)
        trace.free(LOGITS, self._kept + self._output.out + self._copied)

    @property
    def _copied(self) -> int:
        """Bytes of targets, and of the gradients of losses, that a chunk has as copies."""
        return self._chunk.tokens * (INT64 + FP32) if self._sizes.sp > 1 and self._in_chunks else 0

    def _loss_of_chunk(self, trace: MemoryTrace) -> None:
        """Leaves the logits of a chunk, and what their loss keeps."""
        with trace.doing("logits"):
            self._output.forward(trace)
        with trace.doing("loss"):
            trace.take(LOGITS, self._kept)
            half, tokens = self._sizes.e < FP32, self._chunk.tokens
            trace.use(WORK, self._block * (2 if half else 1) + tokens * (INT64 + MASK + 4 * FP32))

    def _head(self, trace: MemoryTrace) -> None:
        """The logits of a chunk, their loss, and the gradient of its hidden states."""
        tokens, half = self._chunk.tokens, self._sizes.e < FP32
        trace.take(LOGITS, self._copied)
        self._loss_of_chunk(trace)
        with trace.doing("loss"):
            wide, narrowed = (self._block, self._block // FP32 * self._sizes.e) if half else (0, 0)
            trace.use(WORK, wide + max(narrowed, self._slope) + tokens * (INT64 + MASK + FP32))
            trace.free(LOGITS, self._kept + self._output.out)
            trace.take(BACKWARD, self._output.out)
        with trace.doing("gradient of the logits"):
            self._output.backward(trace)
        trace.free(LOGITS, self._copied)
