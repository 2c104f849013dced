"""The memory of a gated delta net (core/transformer/delta_net.py), event by event.

[Note: work space of the delta rule] It computes in fp32 for all chunks at once, and keeps nothing but its arguments. The
peaks of its forward and of its backward are linear in the sizes of its tensors, which are [tokens, value heads, channels
of a key, of a value, or tokens of a chunk] and the states between chunks. The factors were measured on a CPU, over ten
shapes (eight where each channel of a key has a decay), of which the plan misses none by more than 3 %.
"""

from __future__ import annotations

import math

from megatron.spec.delta_net import CHUNK, DeltaLatentsSpec, DeltaNetSpec
from megatron.spec.memory.linear import LinearMemory
from megatron.spec.memory.norm import row_statistics
from megatron.spec.memory.trace import ATTENTION, ATTN_PROJ, BACKWARD, CORE_ATTN, WORK, MemoryTrace
from megatron.spec.sizes import FP32, Sizes

# See [Note: work space of the delta rule]: keys, values, tokens of a chunk, states.
_FORWARD, _BACKWARD = (5.9, 3.9, 4.1, 1.4), (9.8, 4.9, 8.6, 4.8)
# Where each channel has a decay.
_FORWARD_OF_CHANNELS, _BACKWARD_OF_CHANNELS = (8.9, 4.0, 3.1, 1.2), (21.4, 4.9, 7.3, 2.3)


class DeltaNetMemory:
    """From the input of the first projection to the output of the last one. The methods are those of
    AttentionLayerMemory, whose place it takes.

    again: everything between the projections is computed again in backward. input_kind: of the memory that the first
    projection reads.
    """

    early, saves_output = 0, False

    def __init__(self, spec: DeltaNetSpec, sizes: Sizes, *, again: bool, input_kind: str) -> None:
        core, tokens, e = spec.core, sizes.tokens, sizes.e
        keys, self._heads = core.key_heads // sizes.tp, core.value_heads // sizes.tp
        self._spec, self._sizes, self._again = spec, sizes, again
        self._in = LinearMemory(spec.in_proj, sizes, (input_kind, ATTENTION), CORE_ATTN if again else None)
        self._out = LinearMemory(spec.linear_proj, sizes, (ATTENTION, WORK))
        self._latents = _latent_linears(spec.latents, sizes, input_kind)
        self._steps = sizes.tokens * self._heads * core.decay_channels * e
        self._convolved = tokens * keys * core.convolved * e
        self._values = tokens * self._heads * core.v_dim * e
        self._queries = tokens * keys * core.qk_dim * e  # or keys
        self._rates = tokens * self._heads * e
        self._numbers = tokens * self._heads * FP32  # one for each value head
        self._inverse = tokens * keys * FP32  # one for each vector that is normalized
        self._gradient = self._numbers * core.decay_channels  # of the decay
        # The decay's saved tensors, and its result.
        self._decays = (1 + core.decay_channels) * self._heads * FP32 + 3 * self._gradient
        self._starts = sizes.b * sizes.s * sizes.cp if sizes.documents else 0
        self._statistics = self._numbers // FP32 * row_statistics(spec.out_norm, sizes)

    @property
    def readers(self) -> tuple[LinearMemory, ...]:
        """See AttentionLayerMemory."""
        return (self._in,) if self._latents is None else (self._in, self._latents[0])

    @property
    def _kept(self) -> int:
        """Bytes between the projections that backward needs, without the output of the gate."""
        return (
            self._convolved
            + 4 * self._queries
            + 2 * self._inverse
            + self._rates
            + self._decays
            + 4 * self._values  # values, outputs, their norm and their gates
            + self._statistics
            + self._starts
        )

    @property
    def _projected_gates(self) -> int:
        """Bytes of gates that a projection returns as they are kept."""
        return 0 if self._latents is None else self._values

    def project(self, trace: MemoryTrace) -> None:
        """See AttentionLayerMemory."""
        self._in.forward(trace)
        if self._latents is None:
            return
        down, *ups = self._latents
        down.forward(trace)
        trace.take(ATTENTION, down.out, CORE_ATTN)
        trace.free(ATTENTION, down.out)
        for linear in ups:
            linear.forward(trace)

    def forward(self, trace: MemoryTrace) -> None:
        """See AttentionLayerMemory."""
        self._mix(trace)
        if self._again:
            trace.free(ATTENTION, self._kept - self._projected_gates, CORE_ATTN)
        self._out.forward(trace)

    def _mix(self, trace: MemoryTrace) -> None:
        """Leaves the tensors that backward needs, and the output of the gate, for which the last projection is asked."""
        steps, wide = 0 if self._latents else self._steps, self._convolved // self._sizes.e * FP32
        trace.take(ATTENTION, self._starts, CORE_ATTN)
        trace.take(ATTENTION, self._convolved + self._values - self._projected_gates + self._rates, CORE_ATTN)
        trace.take(WORK, steps)
        # The convolution, in fp32: its inputs behind a window, their sums, and their sigmoid.
        trace.take(WORK, wide)
        trace.use(WORK, max(self._convolved, wide))
        rounded = self._convolved if self._sizes.e < FP32 else 0
        trace.take(WORK, rounded)
        trace.free(WORK, wide if rounded else 0)
        out = rounded or wide
        trace.take(ATTENTION, 2 * self._queries + self._values, CORE_ATTN)
        trace.free(WORK, out)
        trace.use(WORK, 2 * self._queries // self._sizes.e * FP32)
        trace.take(ATTENTION, 2 * self._queries + 2 * self._inverse, CORE_ATTN)
        trace.take(ATTENTION, self._decays, CORE_ATTN)
        trace.use(WORK, self._rule(_FORWARD if self._latents is None else _FORWARD_OF_CHANNELS))
        trace.take(ATTENTION, self._values, CORE_ATTN)
        trace.use(WORK, 2 * self._values // self._sizes.e * FP32)
        trace.take(ATTENTION, self._values + self._statistics, CORE_ATTN)
        trace.use(WORK, 2 * self._values // self._sizes.e * FP32)
        trace.take(ATTENTION, self._values, ATTN_PROJ)  # the output of the gate
        trace.free(WORK, steps)
        if not self._again:
            trace.free(ATTENTION, self._in.out + (0 if self._latents is None else self._steps))

    def end_layer(self, trace: MemoryTrace) -> None:
        """Nothing lives as long as the layer's function."""

    def backward(self, trace: MemoryTrace, grad: int) -> None:
        """See AttentionLayerMemory."""
        fp32 = self._values // self._sizes.e * FP32
        self._out.backward(trace, grad)
        if self._again:
            self._mix(trace)
            # The output is not needed again, and nothing holds the input of the region any more.
            trace.free(ATTENTION, self._values + self._in.out + (0 if self._latents is None else self._steps))
        # The gate: gradients of both inputs. Then the norm.
        trace.use(BACKWARD, self._values + 3 * fp32)
        trace.take(BACKWARD, 2 * self._values)
        trace.free(BACKWARD, self._values)
        trace.free(ATTENTION, 2 * self._values)
        trace.use(WORK, 3 * fp32)
        trace.free(ATTENTION, self._values + self._statistics)
        trace.use(WORK, self._rule(_BACKWARD if self._latents is None else _BACKWARD_OF_CHANNELS))
        arguments = 2 * self._queries + self._values + self._rates + self._gradient
        trace.take(BACKWARD, arguments)
        trace.free(BACKWARD, self._values)
        trace.free(ATTENTION, 2 * self._queries + self._values + self._rates)
        trace.use(WORK, 3 * self._queries // self._sizes.e * FP32)
        trace.free(ATTENTION, 2 * self._queries + 2 * self._inverse + self._decays)
        # The convolution, in fp32: its sums, their gate and their gradient, inputs, and their gradient.
        trace.take(BACKWARD, self._convolved)
        trace.free(BACKWARD, 2 * self._queries + self._values)
        trace.use(WORK, 5 * self._convolved // self._sizes.e * FP32)
        trace.free(ATTENTION, self._convolved + self._starts)
        trace.take(BACKWARD, self._in.out)
        if self._latents is None:
            trace.free(BACKWARD, self._convolved + self._values + self._rates + self._gradient)
            return
        trace.free(BACKWARD, self._convolved + self._rates + self._gradient - self._steps)
        down, decay, gate = self._latents
        for linear in (gate, decay):
            linear.backward(trace)
        trace.use(BACKWARD, down.out)

    def _rule(self, factors: tuple[float, float, float, float]) -> int:
        """Work space of the delta rule."""
        core, sizes, size = self._spec.core, self._sizes, min(CHUNK, 1 << (self._sizes.s - 1).bit_length())
        chunks = math.ceil(sizes.s / size)
        rows = sizes.b * chunks * size * self._heads
        states = sizes.b * chunks * self._heads * core.qk_dim * core.v_dim
        keys, values, tokens, of_states = factors
        return int(FP32 * (rows * (keys * core.qk_dim + values * core.v_dim + tokens * size) + of_states * states))


def _latent_linears(
    spec: DeltaLatentsSpec | None, sizes: Sizes, input_kind: str
) -> tuple[LinearMemory, LinearMemory, LinearMemory] | None:
    """The projection to latents, and those of decays and of gates."""
    if spec is None:
        return None
    return (
        LinearMemory(spec.down, sizes, (input_kind, ATTENTION)),
        LinearMemory(spec.decay, sizes, (ATTENTION, ATTENTION)),
        LinearMemory(spec.gate, sizes, (ATTENTION, ATTENTION), CORE_ATTN),
    )
