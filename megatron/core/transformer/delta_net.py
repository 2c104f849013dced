"""A gated delta net in the place of attention (Yang, Kautz and Hatamizadeh, arXiv 2412.06464), also in the form of Kimi
Linear (arXiv 2510.26692), where each channel of a key has a decay.

Shapes: s full sequence, b batch, g key heads, n value heads, c channels of a key head that are convolved, k channels of
a query or key, v channels of a value; g/tp and n/tp where sharded: a rank has key heads with all of their value heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.context_parallel.delta_rule import context_parallel_conv, context_parallel_delta_rule
from megatron.core.groups import Group
from megatron.core.recompute.rerun import checkpoint
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, ReplicatedLinear
from megatron.core.transformer.context import Build, Positions, StateCache
from megatron.kernels.ops.attention_segments import starts_of
from megatron.kernels.ops.causal_conv import causal_conv, last_inputs
from megatron.kernels.ops.delta_rule import delta_rule
from megatron.kernels.ops.l2_norm import l2_norm
from megatron.kernels.ops.output_gate import sigmoid_gate, silu_gate
from megatron.spec.delta_net import CHUNK, ConvolutionSpec, DecaySpec, DeltaLatentsSpec, DeltaNetSpec


class GatedDeltaNet(nn.Module):
    """[s or s/tp, b, h] -> the same. Communication: that of the two projections.

    Where the sequence is cut, the convolution and the state are passed on between ranks, or heads are exchanged; see
    core/context_parallel/delta_rule.py.
    """

    def __init__(
        self,
        build: Build,
        spec: DeltaNetSpec,
        comm_type: str = "p2p",
        *,
        recomputes: bool = False,
    ) -> None:
        """comm_type: of --cp-comm-type. recomputes: backward computes everything between the projections again
        (core_attn of --recompute-modules), so that only the output of the first one is kept."""
        super().__init__()
        self.in_proj = build.column(spec.in_proj)
        if spec.latents is not None:
            self.latent_proj = build.replicated(spec.latents.down)
            self.decay_proj = build.column(spec.latents.decay)
            self.gate_proj = build.column(spec.latents.gate)
        self.conv1d = Convolution(build, spec.convolution)
        self.decay = Decay(build, spec.decay)
        self.out_norm = build.norm(spec.out_norm)
        self.out_proj = build.row(spec.linear_proj)
        self._shape, self._latents, self._recomputes, self._rng = spec.core, spec.latents, recomputes, build.rng
        self._heads = spec.core.key_heads // build.groups.tp.size
        # That share a sequence, by their size.
        self._groups: dict[int | None, Group] = {None: build.groups.cp}
        for size, group in build.groups.contexts.items():
            self._groups[size] = group
        self._state_pass = build.kernels.fused.state_pass
        self._rules = {
            size: context_parallel_delta_rule(comm_type, group, build.cp_trace, self._state_pass)
            for size, group in self._groups.items()
        }

    @property
    def readers(self) -> tuple[ColumnParallelLinear | ReplicatedLinear, ...]:
        """The layers that read the hidden states."""
        return (self.in_proj,) if self._latents is None else (self.in_proj, self.latent_proj)

    def forward(self, x: Tensor, positions: Positions, cache: StateCache | None = None) -> Tensor:
        """See the class. With a cache, x holds only the new positions."""
        projected = [self.in_proj(x)]
        if self._latents is not None:
            projected += self._decays_and_gates(x, self._latents)
        if cache is not None:
            return self.out_proj(self._mix_behind(projected, cache))
        starts = starts_of(positions.segments)

        def mix(*projected: Tensor) -> Tensor:
            return self._mix(projected, starts, positions.context)

        mixed = checkpoint(mix, projected, self._rng) if self._recomputes else mix(*projected)
        del projected
        return self.out_proj(mixed)

    def _decays_and_gates(self, x: Tensor, spec: DeltaLatentsSpec) -> list[Tensor]:
        """Returns the steps of the decays and the gates of the outputs, which are projected from latents."""
        parts = self.latent_proj(x).split((spec.decay.in_features, spec.gate.in_features), dim=-1)
        # Copies, because GEMMs and their backward need rows without gaps.
        decay, gate = (part.contiguous() for part in parts)
        return [self.decay_proj(decay), self.gate_proj(gate)]

    def _mix(self, projected: Sequence[Tensor], starts: Tensor | None, context: int | None) -> Tensor:
        """From the outputs of the first projections to the input of the last one.

        starts [b, s]: of the whole sequence.
        """
        x, z, rate, step = self._parts(projected)
        x = context_parallel_conv(x, self._filters, starts, self._groups[context])
        q, k, v = self._heads_of(x)
        del x
        out = self._rules[context](q, k, v, self.decay(step), rate.sigmoid(), starts)
        return self._gated(out, z)

    def _gated(self, out: Tensor, z: Tensor) -> Tensor:
        """The norm of outputs [s, b, n/tp, v], and their gates: [s, b, n/tp v]."""
        gate = silu_gate if self._latents is None else sigmoid_gate
        return gate(self.out_norm(out), z.view_as(out)).flatten(2)

    def _mix_behind(self, projected: Sequence[Tensor], cache: StateCache) -> Tensor:
        """As `_mix`, of new positions of sequences whose others are in the cache."""
        first, window, state = cache.load(projected[0])
        x, z, rate, step = self._parts([first, *projected[1:]])
        q, k, v = self._heads_of(causal_conv(x, self._filters, window=window))
        out, state = delta_rule(
            q, k, v, self.decay(step), rate.sigmoid(), chunk_size=CHUNK, state=state, state_pass=self._state_pass
        )
        cache.store(last_inputs(x, self._shape.taps, window=window), state)
        return self._gated(out, z)

    @property
    def _filters(self) -> Tensor:
        """The weights of the convolution [channels, 1, taps]."""
        return self.conv1d.weight.flatten(0, 1)

    def _parts(self, projected: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the inputs of the convolution, the gates of the outputs, how much is written for each value head, and
        the steps of the decays, all [s, b, channels]."""
        shape, (s, b, _) = self._shape, projected[0].shape
        widths: tuple[int, ...] = (shape.convolved, shape.shared)
        if self._latents is None:
            widths = (shape.convolved, shape.shared * shape.v_dim, shape.shared, shape.shared)
        heads = projected[0].view(s, b, self._heads, -1)
        # Copies, because a view that is kept for backward would keep all of `projected`.
        parts = [part.flatten(2).contiguous() for part in heads.split(widths, dim=-1)]
        if self._latents is None:
            return parts
        (x, rate), (step, gate) = parts, projected[1:]
        return x, gate, rate, step

    def _heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the queries and keys [s, b, g/tp, k] and the values [s, b, n/tp, v] of convolved channels."""
        shape, (s, b, _) = self._shape, x.shape
        widths = (shape.qk_dim, shape.qk_dim, shape.shared * shape.v_dim)
        q, k, v = (part.contiguous() for part in x.view(s, b, self._heads, -1).split(widths, dim=-1))
        return l2_norm(q, shape.qk_dim**-0.5), l2_norm(k), v.view(s, b, -1, shape.v_dim)


class Convolution(nn.Module):
    """The weights [g/tp, c, 1, taps] of ConvolutionSpec."""

    def __init__(self, build: Build, spec: ConvolutionSpec) -> None:
        super().__init__()
        self.weight = build.parameter(dict(spec.parameters())["weight"])


class Decay(nn.Module):
    """The decay of DecaySpec: [s, b, n/tp] -> its logarithm, in fp32; of channels [s, b, n/tp k] -> [s, b, n/tp, k]."""

    def __init__(self, build: Build, spec: DecaySpec) -> None:
        super().__init__()
        parameters = dict(spec.parameters())
        self.A_log, self.dt_bias = (build.parameter(parameters[name]) for name in ("A_log", "dt_bias"))

    def forward(self, step: Tensor) -> Tensor:
        """See the class."""
        rate, bias = self.A_log.float().exp(), self.dt_bias.float()
        if bias.dim() == 2:
            rate, step = rate.unsqueeze(-1), step.unflatten(-1, bias.shape)
        return -rate * F.softplus(step.float() + bias)
