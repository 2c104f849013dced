"""The memory of attention to sequences that are divided over ranks (core/context_parallel), event by event.

A rank's keys and values, as one tensor, are called its pairs here.
"""

from __future__ import annotations

import dataclasses

from megatron.config.context_parallel import copies_of_keys
from megatron.spec.attention import CoreSpec
from megatron.spec.memory.attention_kernel import Heads, flash_backward, needs_padding, padded_heads
from megatron.spec.memory.core_attention import CoreMemory, Release, WholeMemory
from megatron.spec.memory.trace import ATTENTION, BACKWARD, COMMUNICATION, CORE_ATTN, WORK, MemoryTrace
from megatron.spec.sizes import FP32, Sizes
from megatron.spec.work_space import ATTENTION_MATRIX

_STEPS = 3  # of a ring; all further ones repeat the last


def core_memory(core: CoreSpec, sizes: Sizes, heads: Heads, *, copies_queries: bool = False) -> CoreMemory:
    """Returns the memory of attention between its projections. copies_queries: see WholeMemory."""
    if sizes.cp == 1:
        return WholeMemory(core, sizes, heads, copies_queries=copies_queries)
    if sizes.comm_type == "p2p":
        return RingMemory(core, sizes, heads)
    if sizes.comm_type == "all_gather":
        return AllGatherMemory(core, sizes, heads)
    return UlyssesMemory(core, sizes, heads)


class RingMemory(CoreMemory):
    """p2p (core/context_parallel/ring.py)."""

    keeps_keys = keeps_values = False
    keeps_output = True

    def __init__(self, core: CoreSpec, sizes: Sizes, heads: Heads) -> None:
        self._size, self._heads, self._blocks = sizes.cp, heads, _Blocks(core, sizes, heads)
        self._pairs, self._lse = heads.pairs, sizes.tokens * heads.number * FP32
        self.kept = self._pairs + self._lse

    def forward(self, trace: MemoryTrace, part: str) -> None:
        """See CoreMemory. Pairs of two other ranks are here at once: those of a step and those of the next."""
        trace.take(ATTENTION, self.kept, CORE_ATTN)
        self._blocks.begin(trace, part)
        received = self._pairs * min(self._size - 1, 2)
        trace.take(COMMUNICATION, received)
        trace.use(WORK, self._blocks.forward(1.0, 1.0))
        self._blocks.end(trace, part)
        trace.free(COMMUNICATION, received)

    def again(self, trace: MemoryTrace) -> int:
        """See CoreMemory."""
        self.forward(trace, CORE_ATTN)
        return self.kept + self._heads.output

    def backward(self, trace: MemoryTrace, release: Release) -> None:
        """See CoreMemory."""
        blocks, pairs, wide = self._blocks, self._pairs, self._blocks.wide
        halves = blocks.backward(0.5, 0.5)
        step = max(blocks.backward(1.0, 0.5), blocks.backward(0.5, 1.0))
        trace.take(BACKWARD, wide * (self._heads.queries + pairs))
        trace.take(COMMUNICATION, pairs)
        trace.use(WORK, halves)
        current, gradient, late = 0, 0, 0
        steps = min(self._size - 1, _STEPS)
        for left in reversed(range(steps)):
            trace.free(COMMUNICATION, current)
            current = pairs
            coming = pairs if left else 0
            trace.take(COMMUNICATION, coming)
            trace.take(BACKWARD, wide * pairs)
            if wide > 1:  # else it is being sent
                trace.free(BACKWARD, gradient)
            trace.use(WORK, step)
            if wide == 1:
                trace.free(BACKWARD, gradient)
            trace.free(COMMUNICATION, late)
            gradient, late = wide * pairs, pairs if wide == 1 else 2 * pairs
            trace.take(COMMUNICATION, late)
        trace.use(WORK, halves)
        narrow = self._heads.queries + pairs
        trace.take(BACKWARD, narrow if wide > 1 else 0)
        trace.free(BACKWARD, gradient + (wide * narrow if wide > 1 else 0))
        trace.free(COMMUNICATION, current + late)
        trace.free(BACKWARD, self._heads.output)
        trace.free(ATTENTION, self.kept)
        self._release(release)


class AllGatherMemory(CoreMemory):
    """all_gather (core/context_parallel/all_gather.py). Gathers start early, and the reduction ends late."""

    keeps_keys = keeps_values = False
    keeps_output = True

    def __init__(self, core: CoreSpec, sizes: Sizes, heads: Heads) -> None:
        self._heads, self._blocks, self._cpu = heads, _Blocks(core, sizes, heads), sizes.target.cpu
        self._pairs, self._lse = heads.pairs, sizes.tokens * heads.number * FP32
        self._others = sizes.cp - 1
        self._gathered = sizes.cp * self._pairs
        self.kept, self.stays = self._pairs + self._lse, self._pairs
        self.early = self._gathered * (2 if self._cpu else 1)  # gloo gathers into a tensor of its own

    def start(self, trace: MemoryTrace) -> None:
        """See CoreMemory."""
        trace.take(ATTENTION, self._pairs, CORE_ATTN)
        trace.take(COMMUNICATION, self.early)

    def forward(self, trace: MemoryTrace, part: str) -> None:
        """See CoreMemory. Gathered pairs are there twice while they are put in order."""
        trace.take(ATTENTION, self._lse, CORE_ATTN)
        self._blocks.begin(trace, part)
        trace.use(WORK, self._blocks.forward(1.0, 1.0))
        trace.free(COMMUNICATION, self.early - self._gathered)
        trace.use(COMMUNICATION, self._gathered)  # in order
        trace.use(WORK, max(self._blocks.forward(*block) for block in self._shapes))
        trace.free(COMMUNICATION, self._gathered)
        self._blocks.end(trace, part)

    def again(self, trace: MemoryTrace) -> int:
        """See CoreMemory."""
        self.start(trace)
        self.forward(trace, CORE_ATTN)
        return self.kept + self._heads.output

    def backward(self, trace: MemoryTrace, release: Release) -> None:
        """See CoreMemory. The gathered pairs of `early` are in use."""
        blocks, pairs, wide, queries = self._blocks, self._pairs, self._blocks.wide, self._heads.queries
        trace.free(COMMUNICATION, self.early - self._gathered)
        trace.take(BACKWARD, wide * queries)
        trace.use(COMMUNICATION, self._gathered)  # in order
        trace.take(BACKWARD, wide * self._gathered)
        trace.use(WORK, max(blocks.backward(*block) for block in self._shapes))
        trace.free(COMMUNICATION, self._gathered)
        rounded = self._gathered if wide > 1 else 0
        trace.take(COMMUNICATION, rounded + self._reduction)
        trace.free(COMMUNICATION, rounded)
        trace.free(BACKWARD, wide * self._gathered)
        trace.take(BACKWARD, wide * pairs)
        trace.use(WORK, blocks.backward(1.0, 1.0))
        if wide > 1:
            trace.take(BACKWARD, queries + pairs)
            trace.free(BACKWARD, wide * (queries + pairs))
        trace.free(BACKWARD, self._heads.output)
        trace.free(ATTENTION, self.kept)
        self._release(release)

    def finish(self, trace: MemoryTrace) -> None:
        """See CoreMemory."""
        wide = self._blocks.wide * self._pairs
        trace.use(WORK, wide if self._cpu else 0)  # the sum of the pieces
        trace.free(COMMUNICATION, self._reduction - self._pairs)
        trace.use(WORK, wide if wide == self._pairs else 2 * wide + self._pairs)  # its own part is added
        trace.free(COMMUNICATION, self._pairs)

    @property
    def _reduction(self) -> int:
        """Bytes of a reduction of all gradients: what is sent and the result, and on the CPU what is received."""
        return self._gathered * (2 if self._cpu else 1) + self._pairs

    @property
    def _shapes(self) -> tuple[tuple[float, float], ...]:
        """(queries, keys) of the blocks of other ranks' keys: all before the first queries, of the last rank, and all
        between both chunks, of the first."""
        return (1.0, self._others / 2), (0.5, self._others)


class UlyssesMemory(CoreMemory):
    """a2a and a2a+p2p (core/context_parallel/ulysses.py): other attention on whole sequences, or longer parts, of fewer
    heads."""

    keeps_queries = keeps_keys = keeps_values = False

    def __init__(self, core: CoreSpec, sizes: Sizes, heads: Heads) -> None:
        inner = sizes.cp if sizes.comm_type == "a2a" else sizes.cp_inner
        copies = copies_of_keys(heads.number, core.local_groups(sizes.tp), inner)
        self._output, self._copied = heads.output, copies * heads.pairs if copies > 1 else 0
        keys, values = copies * heads.keys, copies * heads.values
        local = Heads(heads.number // inner, heads.queries, keys, values, heads.output)
        self._message = local.queries + local.pairs
        self._pairs = heads.pairs
        self._attention = core_memory(
            core, dataclasses.replace(sizes, s=sizes.s * inner, cp=sizes.cp // inner, comm_type="p2p"), local
        )
        local_core = self._attention
        self._keeps_heads = local_core.keeps_queries or local_core.keeps_keys or local_core.keeps_values
        self.kept = local_core.kept + self._message * self._keeps_heads + heads.output * local_core.keeps_output

    def forward(self, trace: MemoryTrace, part: str) -> None:
        """See CoreMemory."""
        trace.take(WORK, self._copied)
        self._to_heads(trace)
        self._attention.forward(trace, CORE_ATTN)
        if not self._keeps_heads:
            trace.free(ATTENTION, self._message, CORE_ATTN)
        trace.use(COMMUNICATION, 2 * self._output)  # in the order of ranks, and the result
        trace.take(COMMUNICATION, self._output)
        trace.take(ATTENTION, self._output, part)
        trace.free(COMMUNICATION, self._output)
        if not self._attention.keeps_output:
            trace.free(ATTENTION, self._output, CORE_ATTN)
        trace.free(WORK, self._copied)

    def again(self, trace: MemoryTrace) -> int:
        """See CoreMemory."""
        trace.take(WORK, self._copied)
        self._to_heads(trace)
        nbytes = self._attention.again(trace)
        trace.free(WORK, self._copied)
        if not self._keeps_heads:
            trace.free(ATTENTION, self._message)
        return nbytes + self._message * self._keeps_heads

    def backward(self, trace: MemoryTrace, release: Release) -> None:
        """See CoreMemory."""
        message, output, core = self._message, self._output, self._attention
        trace.take(COMMUNICATION, 2 * output)  # in the order of ranks, and the result
        trace.take(BACKWARD, output)  # in the order of the sequence
        trace.free(COMMUNICATION, 2 * output)
        trace.free(BACKWARD, output)
        core.backward(trace, lambda **_: None)  # what it got from here is counted here
        trace.free(ATTENTION, self.kept - core.kept)
        self._release(release)
        trace.take(BACKWARD, message)  # of the three in one
        trace.free(BACKWARD, message)
        trace.take(COMMUNICATION, 2 * message)
        trace.free(BACKWARD, message)
        trace.free(COMMUNICATION, message)
        trace.take(BACKWARD, message)  # apart again
        trace.free(COMMUNICATION, message)
        if self._copied:
            trace.take(BACKWARD, self._pairs)
            trace.free(BACKWARD, self._copied)

    def _to_heads(self, trace: MemoryTrace) -> None:
        trace.take(COMMUNICATION, 2 * self._message)  # in the order of ranks, and the result
        trace.take(ATTENTION, self._message, CORE_ATTN)  # in the order of the sequence
        trace.free(COMMUNICATION, 2 * self._message)


class _Blocks:
    """The work space of blocks of attention, and of their sum (core/context_parallel/blocks.py).

    wide: fp32 bytes per byte of an activation. Results of blocks are added up in fp32.
    """

    def __init__(self, core: CoreSpec, sizes: Sizes, heads: Heads) -> None:
        dropout, capped = core.dropout > 0, core.softcap is not None
        self._core, self._sizes, self._heads = core, sizes, heads
        self._output = heads.output
        self._padded = needs_padding(core, sizes)
        if self._padded:
            self._core, self._heads = padded_heads(core, heads)
        self.wide = FP32 // sizes.e
        self._plain = dropout or capped or sizes.unfused_attention
        # Weights and their gradients, with factors of dropout or slopes of a cap, or both.
        self._matrices = 4 if dropout and capped else 3
        self._limit = None if sizes.unfused_attention and not dropout else ATTENTION_MATRIX

    def forward(self, queries: float, keys: float) -> int:
        """Bytes of a block of so many times the rank's queries and keys, with its result."""
        q, out, pairs = self._parts(queries, keys)
        copied = out + pairs if self._padded else 0
        lse = copied + 4 * queries * self._sizes.tokens * self._heads.number * FP32  # its own, and those of the sum
        if self._plain:
            copies = self.wide * (q + pairs) if self.wide > 1 else 0
            matrices = 3 * FP32 * self._weights(queries, keys)
            return int(max(copies + matrices, 2 * self.wide * out) + lse)
        if self._sizes.target.wide:
            return int(self.wide * (q + out + pairs) + lse)
        return int((1 + (self.wide if self.wide > 1 else 0)) * out + lse)

    def backward(self, queries: float, keys: float) -> int:
        """Bytes of the backward of such a block, with the gradients of queries, keys and values."""
        q, out, pairs = self._parts(queries, keys)
        copied = q + 2 * out + pairs if self._padded else 0
        copies = self.wide * (q + 2 * out + pairs) if self.wide > 1 and (self._plain or self._sizes.target.wide) else 0
        if self._plain:
            # Of gradient and output; gradients of all keys, and of some queries.
            products = self.wide * (q + 2 * pairs)
            return int(copies + products + self._matrices * FP32 * self._weights(queries, keys))
        results = (self.wide if self._sizes.target.wide else 1) * (q + pairs)
        repeated = int(keys * self._heads.repeated_pairs)
        work = 0 if copies else flash_backward(self._core, self._sizes, self._heads, int(q), int(out), repeated)
        return int(copied + copies + results + work)

    def begin(self, trace: MemoryTrace, part: str) -> None:
        """The sum of results is in use, in fp32: of fp32 activations it is the output."""
        if self.wide == 1:
            trace.take(ATTENTION, self._output, part)
        else:
            trace.take(WORK, self.wide * self._output)

    def end(self, trace: MemoryTrace, part: str) -> None:
        """Leaves the output alone."""
        if self.wide > 1:
            trace.take(ATTENTION, self._output, part)
            trace.free(WORK, self.wide * self._output)

    def _parts(self, queries: float, keys: float) -> tuple[float, float, float]:
        """Bytes of a block's queries, of its result, and of its keys and values."""
        return queries * self._heads.queries, queries * self._heads.output, keys * self._heads.pairs

    def _weights(self, queries: float, keys: float) -> float:
        """Probabilities that are there at once."""
        sizes = self._sizes
        block = sizes.b * self._heads.number * queries * sizes.s * keys * sizes.s
        return block if self._limit is None else min(block, self._limit)
