"""What --recompute-policy balanced chooses for the layers of a pipeline rank, from bytes and times of one microbatch.

A run measures them (training/balanced_recompute.py), a plan computes them (planner/time/balanced_layers.py). Options,
price and choice are those of this file for both.

[Note: cost of offloading a layer] The time by which a copy exceeds the computation that it is overlapped with: a
layer's forward for the copy to the host, and a layer's backward for the reload. The last layers of a stage stay on the
device (RESIDENT_LAYERS in config/activation_offload.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.base.errors import ConfigError
from megatron.config.activation_offload import RESIDENT_LAYERS
from megatron.config.recompute import LayerChoices, RecomputeConfig
from megatron.planner.memory.balance import Choice, Option, cheapest, front
from megatron.schedule.partition import Stage

_MIB = 2**20


class LayerTimes(NamedTuple):
    """Seconds of one microbatch in a layer, without recompute."""

    forward: float
    backward: float


class CopyTimes(NamedTuple):
    """Seconds of a copy alone."""

    to_host: float
    to_device: float


@dataclass(frozen=True)
class LayerOption:
    """An option of a layer and its recompute flags. offloaded: bytes of one microbatch that go to host memory."""

    option: Option
    config: RecomputeConfig
    offloaded: int = 0


@dataclass(frozen=True)
class RankChoice:
    """The option of every layer of a rank.

    options: by the number of the layer. front: all choices that no other one beats. choice: bytes of all microbatches
    held at once, seconds of one. keep: bytes if nothing is recomputed or offloaded. budget: bytes.
    """

    options: Mapping[int, LayerOption]
    front: list[Choice]
    choice: Choice
    keep: int
    budget: float

    @property
    def layers(self) -> LayerChoices:
        """The choice for the model."""
        configs = {number: option.config for number, option in self.options.items()}
        return LayerChoices(configs, frozenset(number for number, option in self.options.items() if option.offloaded))

    def __str__(self) -> str:
        """Number of layers per option, for the start-up table."""
        return ", ".join(f"{count} x {name}" for name, count in self.choice.counts().items())


def with_offload(
    options: Sequence[LayerOption], times: LayerTimes, copy: Callable[[int], CopyTimes]
) -> list[LayerOption]:
    """Returns the options, and each once more with everything that it keeps offloaded; see the note.

    copy: the times of copies of that many bytes.
    """
    return [*options, *(_offloaded(option, times, copy(option.option.nbytes)) for option in options)]


def _offloaded(option: LayerOption, times: LayerTimes, copies: CopyTimes) -> LayerOption:
    exposed = max(0.0, copies.to_host - times.forward) + max(0.0, copies.to_device - times.backward)
    priced = Option(f"{option.option.name} (offloaded)", 0, option.option.seconds + exposed)
    return LayerOption(priced, option.config, option.option.nbytes)


def choose(
    options_of: Mapping[int, Sequence[LayerOption]], stages: Sequence[Stage], rank: int, in_flight: float, budget: float
) -> RankChoice:
    """Returns the choice for pipeline rank `rank` with these stages. Raises ConfigError for too small a budget.

    options_of: layer -> its options, the first of which keeps everything. in_flight: microbatches that the rank holds
    at once. budget: --activation-memory-budget, bytes or a share of the bytes without recompute.
    """
    resident = {number for stage in stages for number in list(stage.layers)[-RESIDENT_LAYERS:]}
    # A chunk of a microbatch keeps what its own stage's layers keep.
    times = in_flight / max(1, len(stages))
    allowed = {
        number: [option for option in options_of[number] if not (option.offloaded and number in resident)]
        for stage in stages
        for number in stage.layers
    }
    held = [[option.option.held(times) for option in options] for options in allowed.values()]
    keep = sum(options[0].nbytes for options in held)
    limit = budget * keep if budget <= 1 else budget
    choices = front(held)
    choice = cheapest(choices, limit)
    if choice is None:
        raise ConfigError(
            f"--activation-memory-budget {budget:g} is {limit / _MIB:.1f} MiB on pipeline rank {rank}, whose layers "
            f"keep {choices[-1].nbytes / _MIB:.1f} MiB at the least; give that much, or a smaller --micro-batch-size"
        )
    picked = {
        number: next(option for option in options if option.option.name == taken.name)
        for (number, options), taken in zip(allowed.items(), choice.options, strict=True)
    }
    return RankChoice(picked, choices, choice, keep, limit)
