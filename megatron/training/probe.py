"""Runs one layer, or one end of the model, on random numbers of a microbatch's shape, apart from the model, to measure
it.

Whatever asks how long a layer takes or how many bytes it keeps asks here: balanced recompute (balanced_recompute.py),
and the profile of a machine (tooling/profile). The parts of the model are its own modules, with their own weights,
inputs and gradients in fp32, as in a step.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.config.data import DataConfig
from megatron.config.recompute import RecomputeConfig
from megatron.config.train import TrainConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.parameter import GradSlot, Parameter, initialize, local_parameters
from megatron.core.recompute.saved_bytes import saved_bytes
from megatron.core.timeline import Lap, laps
from megatron.core.transformer.block import TransformerBlock
from megatron.core.transformer.context import Build, Positions
from megatron.core.transformer.lora import freeze_all_but_adapters
from megatron.kernels.ops.alibi import position_channels
from megatron.kernels.ops.attention_segments import segments_of
from megatron.kernels.ops.rope import rotary_frequencies, rotary_tables
from megatron.schedule.partition import Stage
from megatron.training.batch import part_of


class PhaseLaps(NamedTuple):
    """The times of one microbatch. input_grad: backward without the weight gradients of linear layers, but with what it
    recomputes."""

    forward: Lap
    input_grad: Lap
    weight_grad: Lap

    @property
    def seconds(self) -> float:
        """Seconds of the device for all three."""
        return self.forward.device + self.input_grad.device + self.weight_grad.device

    @property
    def host(self) -> float:
        """Seconds that the host needs to queue all."""
        return self.forward.host + self.input_grad.host + self.weight_grad.host


class Probe(ABC):
    """A part of the model that can run forward and backward."""

    def __init__(self, device: torch.device, parameters: Mapping[str, Parameter], seed: int, *, adapters: bool) -> None:
        """adapters: all but those of LoRA are frozen."""
        self._device = device
        initialize(dict(parameters), seed)
        if adapters:
            freeze_all_but_adapters(dict(parameters))
        self._trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        for parameter in self._trained:
            slot = parameter.slot = GradSlot(_no_memory)
            slot.main_grad = torch.zeros(parameter.shape, dtype=torch.float32, device=device)
            slot.fresh = False  # as in all microbatches of a step but the first

    def laps(self, idle: float = 0.0) -> PhaseLaps:
        """Runs forward and backward once. idle: see `timeline.laps`."""
        jobs: list[Callable[[], None]] = []
        pair: list[Tensor] = []

        def forward() -> None:
            out = self.forward()
            pair.extend((out, torch.ones_like(out)))

        def input_grad() -> None:
            out, grad = pair
            pair.clear()
            torch.autograd.backward(out, grad)

        def weight_grad() -> None:
            for job in jobs:
                job()

        for parameter in self._trained:
            assert parameter.slot is not None
            parameter.slot.deferred = jobs
        result = PhaseLaps(*laps(self._device, (forward, input_grad, weight_grad), idle=idle))
        for parameter in self._trained:
            parameter.grad = None
        return result

    @abstractmethod
    def forward(self) -> Tensor:
        """A forward, whose result holds the graph."""


class LayerProbe(Probe):
    """A decoder layer."""

    def __init__(
        self, data: DataConfig, train: TrainConfig, build: Build, number: int, recompute: RecomputeConfig
    ) -> None:
        """number: of the layer in the model. recompute: what its backward repeats."""
        self._number = number
        self._block = TransformerBlock(dataclasses.replace(build, recompute=recompute), [number], final_norm=False)
        super().__init__(
            build.device, local_parameters(self._block), train.seed, adapters=build.config.lora_rank is not None
        )
        assert data.seq_length and train.micro_batch_size
        groups, b = build.groups, train.micro_batch_size
        shards = groups.tp.size if build.sequence_parallel else 1
        places = part_of(torch.arange(data.seq_length, device=build.device).unsqueeze(0), groups.cp, shards)
        tables = tuple(
            rotary_tables(places, *rotary_frequencies(rotary, build.device), build.dtype)
            for rotary in build.spec.rotaries
        )
        if build.spec.position_channels:
            tables = (position_channels(places, build.dtype),)
        segments = None
        if data.separate_documents:
            whole = torch.zeros(b, places.shape[1] * groups.cp.size, dtype=torch.int64)
            segments = segments_of(whole, build.device)
        self._positions = Positions(tables, segments)
        self._x = _hidden(build, places.shape[1] // shards, b)

    def saved_bytes(self) -> int:
        """Bytes that a forward saves for backward: distinct storages,
        without parameters and tensors shared by layers."""
        shared = [*self._block.parameters(), *itertools.chain(*self._positions.rotary)]
        if self._positions.segments is not None:
            shared += self._positions.segments.tensors
        return saved_bytes(self.forward, shared)

    def forward(self) -> Tensor:
        """See Probe."""
        self._x.grad = None
        out: Tensor = self._block(
            self._x, self._positions, layers=range(self._number, self._number + 1), final_norm=False
        )
        return out


class EndProbe(Probe):
    """The embedding, or the final norm with the head and the loss, which backward computes."""

    def __init__(self, data: DataConfig, train: TrainConfig, build: Build, *, head: bool) -> None:
        self._model = GPTModel(build, [Stage(0, range(0), embedding=not head, head=head)])
        super().__init__(
            build.device, local_parameters(self._model), train.seed, adapters=build.config.lora_rank is not None
        )
        assert data.seq_length and train.micro_batch_size and build.config.vocab_size
        groups, b = build.groups, train.micro_batch_size
        shards = groups.tp.size if build.sequence_parallel else 1
        places = part_of(torch.arange(data.seq_length, device=build.device).unsqueeze(0), groups.cp, shards)
        s = places.shape[1]
        self._places = places
        self._tokens = torch.randint(build.config.vocab_size, (b, s), device=build.device)
        self._length = data.seq_length
        self._x = _hidden(build, s // shards, b) if head else None

    def forward(self) -> Tensor:
        """See Probe."""
        if self._x is not None:
            self._x.grad = None
        out: Tensor = self._model(
            self._tokens,
            self._places,
            labels=self._tokens,
            lengths=self._length,
            received=self._x,
            loss_in_backward=True,
        )
        return out if self._x is None else out.sum()


def _hidden(build: Build, s: int, b: int) -> Tensor:
    """Random hidden states [s, b, h] that collect a gradient."""
    dtype = torch.float32 if build.config.fp32_residual_connection else build.dtype
    assert build.config.hidden_size
    return torch.rand((s, b, build.config.hidden_size), dtype=dtype, device=build.device).requires_grad_()


def _no_memory() -> None:
    raise AssertionError("a probe's gradients have their memory from the beginning")
