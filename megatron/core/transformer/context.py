"""What every part of a decoder needs to build itself and to run one forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.recompute import KEEP_ALL, LayerChoices, RecomputeConfig
from megatron.core.context_parallel.watch import UNWATCHED, Watch
from megatron.core.groups import Groups
from megatron.core.tensor_parallel.overlap import PLAIN, Plain
from megatron.core.tensor_parallel.random import RngTracker
from megatron.kernels.choose import Kernels


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
    cp_watch: Watch = UNWATCHED
    recompute: RecomputeConfig | LayerChoices = KEEP_ALL

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        dtype: torch.dtype = getattr(torch, self.config.dtype_name)
        return dtype


class KeyValueCache(Protocol):
    """Keys and values of one layer that are already computed, for generation."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k, v [s, b, groups/tp, d]; return all so far, [t, b, groups/tp, d]."""
        ...


@dataclass(frozen=True)
class Positions:
    """Per-forward data of attention: rotary tables (None without rotary embedding) and document segments [b, s]."""

    rotary: tuple[Tensor, Tensor] | None
    segments: Tensor | None
