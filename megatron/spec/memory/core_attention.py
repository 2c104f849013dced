"""The memory of attention between its projections, event by event: of whole sequences, and when it is computed twice.

Attention to sequences that are divided over ranks: see context_parallel.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from megatron.spec.attention import CoreSpec
from megatron.spec.memory.attention_kernel import Heads, kernel_memory
from megatron.spec.memory.trace import ATTENTION, BACKWARD, CORE_ATTN, WORK, MemoryTrace
from megatron.spec.sizes import FP32, Sizes


class Release(Protocol):
    """Frees those of a layer's queries, keys and values that were kept for backward."""

    def __call__(self, *, queries: bool, keys: bool, values: bool) -> None: ...


class CoreAttentionMemory(ABC):
    """From queries, keys and values as a layer has them, which are in use, to the output, and back to their gradients.

    Bytes. kept: from forward to backward, without what the layer has. early: taken by the layer when its backward
    begins. keeps_queries, keeps_keys, keeps_values: those of the layer are kept. keeps_output: what is returned is
    kept, too. strided: the output is not in the order of its dims.
    """

    kept = early = 0
    keeps_queries = keeps_keys = keeps_values = True
    keeps_output = strided = False

    def start(self, trace: MemoryTrace) -> None:
        """What happens as soon as keys and values are there. By default, nothing."""
        return

    @abstractmethod
    def forward(self, trace: MemoryTrace, part: str) -> None:
        """Leaves what is kept, and the output. part: of the layer, which saves the output."""

    @abstractmethod
    def backward(self, trace: MemoryTrace, release: Release) -> None:
        """From the gradient of the output, in use, to those of queries, keys and values, which take its place. Frees
        what is kept, and releases what is kept of the layer's."""

    def finish(self, trace: MemoryTrace) -> None:
        """What happens when the gradient of the queries has left. By default, nothing."""
        return


class CoreMemory(CoreAttentionMemory):
    """The same of attention that backward may compute again. stays: the part of `kept` that stays although it does."""

    stays = 0

    @abstractmethod
    def again(self, trace: MemoryTrace) -> int:
        """The second run of a forward, which ends with the last kept tensor. Leaves so many bytes: `kept`, and those
        that live as long."""

    def _release(self, release: Release) -> None:
        release(queries=self.keeps_queries, keys=self.keeps_keys, values=self.keeps_values)


class WholeMemory(CoreMemory):
    """One kernel on the sequences that a rank holds whole."""

    def __init__(self, core: CoreSpec, sizes: Sizes, heads: Heads, *, copies_queries: bool = False) -> None:
        """copies_queries: the kernel cannot read them as they are, and keeps a copy."""
        kernel = self._kernel = kernel_memory(core, sizes, heads)
        self._output, self._gradients = heads.output, heads.queries + heads.pairs
        self._wide = FP32 // sizes.e if sizes.target.wide else 1
        self.kept = kernel.kept + heads.queries * copies_queries
        self.keeps_queries = kernel.keeps_queries and not copies_queries
        self.keeps_keys, self.keeps_values = kernel.keeps_keys, kernel.keeps_values
        self.keeps_output, self.strided = kernel.keeps_output, kernel.strided

    def forward(self, trace: MemoryTrace, part: str) -> None:
        """See CoreMemory."""
        trace.take(ATTENTION, self.kept, CORE_ATTN)
        trace.take(ATTENTION, self._output, part)
        trace.use(WORK, self._kernel.forward)

    def again(self, trace: MemoryTrace) -> int:
        """See CoreMemory. A fused kernel keeps its output, plain products end before it."""
        made = self.kept + (self._output if self.strided or self.keeps_output else 0)
        trace.take(ATTENTION, made)
        trace.use(WORK, self._kernel.forward)
        return made

    def backward(self, trace: MemoryTrace, release: Release) -> None:
        """See CoreMemory."""
        wide = self._wide
        widened = wide * self._output if wide > 1 else 0
        trace.take(BACKWARD, widened)
        trace.use(WORK, self._kernel.backward)
        trace.take(BACKWARD, wide * self._gradients)
        trace.free(BACKWARD, widened + self._output)
        trace.free(ATTENTION, self.kept)
        self._release(release)
        if wide > 1:
            trace.take(BACKWARD, self._gradients)
            trace.free(BACKWARD, wide * self._gradients)


class ComputedAgain(CoreAttentionMemory):
    """Attention that backward computes again from its arguments (core/transformer/core_attention.py)."""

    def __init__(self, core: CoreMemory) -> None:
        self._core = core
        self.kept = core.stays
        self.strided, self.early = core.strided, core.early

    def start(self, trace: MemoryTrace) -> None:
        """See CoreMemory."""
        self._core.start(trace)

    def forward(self, trace: MemoryTrace, part: str) -> None:
        """See CoreMemory."""
        self._core.forward(trace, part)
        trace.free(ATTENTION, self._core.kept - self.kept, CORE_ATTN)

    def backward(self, trace: MemoryTrace, release: Release) -> None:
        """See CoreMemory."""
        core = self._core
        made = core.again(trace)
        release(queries=not core.keeps_queries, keys=not core.keeps_keys, values=not core.keeps_values)
        core.backward(trace, release)
        trace.free(ATTENTION, made - core.kept + self.kept)

    def finish(self, trace: MemoryTrace) -> None:
        """See CoreMemory."""
        self._core.finish(trace)
