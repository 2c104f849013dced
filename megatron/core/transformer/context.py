"""The arguments that all layers of a decoder share: to be built, and to run one forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.moe_training import MoEConfig
from megatron.config.recompute import KEEP_ALL, LayerChoices, RecomputeConfig
from megatron.config.train import LOSS_CHUNK
from megatron.core.comm.collectives import all_reduce, all_reduce_in_rank_order
from megatron.core.comm.regions import Reduce
from megatron.core.context_parallel.transfer_trace import UNTRACED, Trace
from megatron.core.expert_parallel.plan import ReadCounts, read_counts
from megatron.core.groups import Groups
from megatron.core.parameter import Parameter, make_parameter
from megatron.core.tensor_parallel.linear import (
    ColumnParallelLinear,
    LinearContext,
    ReplicatedLinear,
    RowParallelLinear,
)
from megatron.core.tensor_parallel.overlap import PLAIN, Plain
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.norm import NoNorm, Norm
from megatron.kernels.choose import Kernels
from megatron.kernels.ops.attention_segments import Segments
from megatron.spec.decoder import DecoderSpec, decoder_spec
from megatron.spec.linear import LinearSpec
from megatron.spec.norm import NormSpec
from megatron.spec.parameter import ParamSpec

DEFAULT_MOE = MoEConfig()


@dataclass(frozen=True)
class Build:
    """Constructor arguments that all layers share."""

    config: ModelConfig
    groups: Groups
    sequence_parallel: bool
    kernels: Kernels
    rng: RngTracker
    device: torch.device
    overlap: Plain = PLAIN
    cp_comm_types: tuple[str, ...] = ()  # of each layer; read where the sequence is cut
    cp_trace: Trace = UNTRACED
    recompute: RecomputeConfig | LayerChoices = KEEP_ALL
    moe: MoEConfig = DEFAULT_MOE
    z_loss: float = 0.0  # coefficient of the logits' squared log-sum-exp
    loss_chunk: int = LOSS_CHUNK  # tokens whose logits exist at once
    read_counts: ReadCounts = read_counts  # brings the counts of an exchange of tokens to the host
    yield_turn: Callable[[], None] = lambda: None  # called while an exchange of tokens is on its way: streams/turns.py
    temperature: float = 1.0  # divides all logits: the distribution that reinforcement learning samples and trains

    @functools.cached_property
    def spec(self) -> DecoderSpec:
        """The decoder that the configuration describes."""
        return decoder_spec(self.config)

    @property
    def logits_scaling(self) -> float:
        """What the head's logits are divided by: the model's factor times the temperature."""
        return self.spec.logits_scaling * self.temperature

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        dtype: torch.dtype = getattr(torch, self.config.dtype_name)
        return dtype

    @property
    def all_reduce(self) -> Reduce:
        """Adds up activations over tp, with --batch-invariant-mode in an order that no place of a token changes."""
        return all_reduce_in_rank_order if self.config.batch_invariant_mode else all_reduce

    def column(self, spec: LinearSpec, weight: Parameter | None = None) -> ColumnParallelLinear:
        """A linear layer with sharded outputs; `weight`: another module's, which it shares."""
        return ColumnParallelLinear(spec, self._linear, weight)

    def row(self, spec: LinearSpec) -> RowParallelLinear:
        """A linear layer with sharded inputs."""
        return RowParallelLinear(spec, self._linear)

    def replicated(self, spec: LinearSpec) -> ReplicatedLinear:
        """A linear layer that every rank of tp holds."""
        return ReplicatedLinear(spec, self._linear)

    def norm(self, spec: NormSpec) -> Norm:
        """A normalization layer."""
        return Norm(
            spec,
            self.groups,
            sequence_parallel=self.sequence_parallel,
            dtype=self.dtype,
            device=self.device,
            kernel=self.kernels.fused.norm,
            reduce=self.all_reduce,
        )

    def optional_norm(self, spec: NormSpec | None) -> Norm | None:
        """A normalization layer, if there is one."""
        return None if spec is None else self.norm(spec)

    def stream_norm(self, spec: NormSpec | None) -> Norm | NoNorm:
        """A normalization layer of the residual stream, or the place of one."""
        return NoNorm(self.dtype) if spec is None else self.norm(spec)

    def parameter(self, spec: ParamSpec) -> Parameter:
        """This rank's piece of a parameter, uninitialised."""
        return make_parameter(
            spec, self.groups, sequence_parallel=self.sequence_parallel, dtype=self.dtype, device=self.device
        )

    @functools.cached_property
    def _linear(self) -> LinearContext:
        return LinearContext(
            self.groups,
            self.sequence_parallel,
            self.kernels.linear,
            self.dtype,
            self.device,
            self.overlap.in_rank_order() if self.config.batch_invariant_mode else self.overlap,
        )


class KeyValueCache(Protocol):
    """Keys and values of one layer that are already computed, for generation."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k [s, b, groups/tp, qk_dim] and v [s, b, groups/tp, v_dim]; return all so far that a new query may see,
        with t tokens."""
        ...


class StateCache(Protocol):
    """The state of one layer with a gated delta rule, and the last inputs of its convolution, for generation."""

    def load(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns x [s, b, ...] of the new positions, with zeros where they are padding, and what is before them: the
        convolution's window [taps - 1, b, channels] and the state [b, heads/tp, d_k, d_v], None at the first token.

        No document begins behind padding of zeros: neither convolution nor rule needs starts.
        """
        ...

    def store(self, window: Tensor, state: Tensor) -> None:
        """Keeps the window and the state behind the new positions."""
        ...


LayerCache = KeyValueCache | StateCache


@dataclass(frozen=True)
class Positions:
    """Per-forward data of attention: cos and sin of each rotary embedding in `DecoderSpec.rotaries`, empty where
    nothing is rotated, or with ALiBi the channels of keys' positions; the documents of the samples; and the number of
    ranks that share them, None for those of cp. query_scales: the factor on each position's queries [s, b or 1, 1, 1],
    None where all are 1."""

    rotary: tuple[tuple[Tensor, Tensor], ...]
    segments: Segments | None
    context: int | None = None
    query_scales: Tensor | None = None
