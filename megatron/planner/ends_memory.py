"""What the two ends of the model take and free, event by event: the embedding, and final norm, head and loss."""

from __future__ import annotations

from megatron.config.model import ModelConfig
from megatron.planner.layer_memory import NormMemory
from megatron.planner.product_memory import LinearMemory
from megatron.planner.sizes import (
    BACKWARD,
    COMMUNICATION,
    DROPOUT,
    EMBEDDING,
    FP32,
    INT64,
    LOGITS,
    MASK,
    NORMS,
    RESIDUAL,
    WORK,
    Sizes,
)
from megatron.planner.tally import Tally
from megatron.spec.work_space import CROSS_ENTROPY_BLOCK


class EmbeddingMemory:
    """Token ids to the residual stream."""

    def __init__(self, model: ModelConfig, sizes: Sizes) -> None:
        self._sizes = sizes
        self._positions = 0
        if model.position_embedding_type == "learned_absolute":
            assert model.max_position_embeddings
            self._positions = model.max_position_embeddings * sizes.h * sizes.e
        self._dropout = model.hidden_dropout > 0
        self._local_ids = sizes.tokens * (INT64 + MASK) if sizes.tp > 1 else 0

    def forward(self, tally: Tally) -> None:
        """Leaves the residual stream."""
        sizes = self._sizes
        tally.take(EMBEDDING, self._local_ids)
        tally.take(WORK, sizes.whole)
        if sizes.sp > 1:
            tally.take(WORK, sizes.hidden)
            tally.brief(COMMUNICATION, sizes.whole if sizes.target.cpu else 0)
            tally.free(WORK, sizes.whole)
        elif sizes.tp > 1:
            tally.brief(WORK, sizes.whole)  # summed in a copy
        if self._positions:
            tally.brief(WORK, sizes.hidden + sizes.hidden // sizes.b)
        tally.take(RESIDUAL, sizes.residual)
        if sizes.residual == sizes.hidden:
            tally.free(WORK, sizes.hidden)
        if self._dropout:
            tally.take(DROPOUT, self._mask)
            tally.brief(WORK, sizes.residual)
        if sizes.residual != sizes.hidden:
            tally.free(WORK, sizes.hidden)

    def backward(self, tally: Tally) -> None:
        """The gradient of the residual stream is used up."""
        sizes = self._sizes
        if self._dropout:
            tally.brief(BACKWARD, sizes.residual)
            tally.free(DROPOUT, self._mask)
        tally.brief(WORK, self._positions)
        around = (sizes.hidden if sizes.residual != sizes.hidden else 0) + (sizes.whole if sizes.sp > 1 else 0)
        masked = sizes.whole if sizes.tp > 1 else 0
        fp32 = sizes.whole // sizes.e * FP32 if sizes.target.cpu and sizes.e < FP32 else 0
        tally.brief(WORK, around + masked + fp32)
        tally.free(EMBEDDING, self._local_ids)
        tally.free(BACKWARD, sizes.residual)

    @property
    def _mask(self) -> int:
        sizes = self._sizes
        return sizes.rows * sizes.h * (sizes.r if sizes.target.cpu else MASK)


class HeadMemory:
    """The residual stream to the loss."""

    def __init__(self, model: ModelConfig, sizes: Sizes, *, split: bool) -> None:
        self._sizes = sizes
        self._norm = NormMemory(sizes, model.normalization == "RMSNorm", sizes.rows * sizes.h, sizes.h)
        fusion = model.gradient_accumulation_fusion
        kinds = (NORMS, LOGITS)
        self._head = LinearMemory(sizes, kinds, sizes.h, sizes.vocab, True, fusion, False, put_off=split)
        self._kept = sizes.tokens * ((INT64 if sizes.b > 1 else 0) + FP32)  # targets; log-sum-exp
        rows = max(
            1, min(sizes.tokens, CROSS_ENTROPY_BLOCK["cpu" if sizes.target.cpu else "cuda"] // max(1, sizes.vocab))
        )
        self._block = rows * sizes.vocab * FP32

    def forward(self, tally: Tally) -> None:
        """Of the logits there is one tensor, in which backward writes their gradient."""
        half = self._sizes.e < FP32
        with tally.doing("norm"):
            self._norm.forward(tally)
        if self._norm.copies:
            tally.free(RESIDUAL, self._sizes.residual)
        with tally.doing("logits"):
            self._head.forward(tally)
        with tally.doing("loss"):
            tally.take(LOGITS, self._kept)
            tally.brief(WORK, self._block * (2 if half else 1) + self._sizes.tokens * (INT64 + MASK + 4 * FP32))

    def backward(self, tally: Tally) -> None:
        """Leaves the gradient of the residual stream."""
        sizes = self._sizes
        with tally.doing("loss"):
            narrowed = self._block // FP32 * sizes.e
            tally.brief(WORK, (self._block + narrowed if sizes.e < FP32 else 0) + sizes.tokens * (INT64 + MASK + FP32))
            tally.free(LOGITS, self._kept + sizes.logits)
            tally.take(BACKWARD, sizes.logits)
        with tally.doing("gradient of the logits"):
            self._head.backward(tally)
        with tally.doing("norm"):
            self._norm.backward(tally)
        if not self._norm.copies:
            tally.free(RESIDUAL, sizes.residual)
