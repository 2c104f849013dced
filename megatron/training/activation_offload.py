"""Activation offload of a run: built from its flags, told of its steps, and --pipeline-offload-ratio auto."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.base.log import get_logger
from megatron.config.run import RunConfig
from megatron.core.comm.collectives import gather_objects
from megatron.core.groups import Groups
from megatron.core.memory.activation_offload import ActivationOffload, ByRatio, Policy
from megatron.core.memory.copier import Copier, StreamCopier, ThreadCopier, measured_bandwidth
from megatron.core.memory.layerwise import ChosenLayers, FirstLayers, mark_layers
from megatron.core.memory.modulewise import ByModules
from megatron.core.memory.tiers import FarMemory
from megatron.core.models.gpt import GPTModel
from megatron.core.timeline import Interval, Timeline
from megatron.planner.memory.activation_offload import StageTimes, largest_hidden_ratio
from megatron.schedule.offload_pass import moved_groups, with_offload
from megatron.schedule.schedule import Kind, Schedule

log = get_logger(__name__)
_MEASURED_STEP = 2  # of those that this process takes: the first one is slow for reasons of its own


class StepOffload:
    """What a training step needs: the actions of its schedule, and what its computations run in."""

    def __init__(self, offload: ActivationOffload, groups: Groups, rates: tuple[float, float] | None = None) -> None:
        """`rates`: bytes a second out and in, where the ratio is to be found; then nothing moves at first."""
        self.actions, self._groups, self._rates, self._steps = offload, groups, rates, 0
        self._clock = Timeline(offload.device)
        self._schedule: Schedule | None = None

    def begin_step(self, schedule: Schedule, batch: Iterable[Tensor]) -> Schedule:
        """The schedule with the actions that move activations. `batch`: tensors that live through the step."""
        self._schedule, self._steps = schedule, self._steps + 1
        if self._rates is not None and self._steps == _MEASURED_STEP:
            self._clock.start()
        if self.actions.policy.whole > 0.0:
            schedule = _with_offload(schedule)
        self.actions.begin_step(moved_groups(schedule.actions[self._groups.pp.rank]), batch)
        return schedule

    def end_step(self) -> None:
        """Every backward has run. Communication: once, where the ratio is to be found, one gathering over the world."""
        self.actions.end_step()
        if self._rates is not None and self._steps == _MEASURED_STEP:
            ratio = self._found_ratio(self._rates)
            self.actions.policy, self._rates = ByRatio(ratio), None

    @contextlib.contextmanager
    def forward(self, stage: int, microbatch: int, received: Tensor | None) -> Iterator[Tensor | None]:
        """The body is a forward, on what it is given instead of `received`."""
        with self._clock.span(Kind.FORWARD.value, str(stage)), self.actions.forward(stage, microbatch, received) as x:
            yield x

    @contextlib.contextmanager
    def backward(self, kind: Kind, stage: int) -> Iterator[None]:
        """The body is a backward, or a half of one."""
        self.actions.begin_backward()
        with self._clock.span(kind.value, str(stage)):
            yield

    def _found_ratio(self, rates: tuple[float, float]) -> float:
        """The largest that stays hidden, the same on all ranks."""
        assert self._schedule is not None
        mine = _stage_times(self._clock.stop(), self.actions)
        slowest_rates: list[float] = [float("inf"), float("inf")]
        stages: dict[int, StageTimes] = {}
        for times, here in gather_objects((mine, rates), self._groups.world):
            slowest_rates = [min(pair) for pair in zip(slowest_rates, here, strict=True)]
            # Replicas of a stage differ by noise: the fastest has the least time for its copies.
            for stage, found in times.items():
                if stage not in stages or found.forward < stages[stage].forward:
                    stages[stage] = found
        out, back = slowest_rates
        ratio = largest_hidden_ratio(self._schedule, [stages[number] for number in sorted(stages)], out, back)
        log.info(
            "--pipeline-offload-ratio auto is %.2f from now on: a stage saves %.1f MiB a microbatch in %.2f ms, and memory "
            "is copied at %.1f GB/s out and %.1f GB/s in",
            ratio,
            max(stage.nbytes for stage in stages.values()) / 2**20,
            1e3 * max(stage.forward for stage in stages.values()),
            out / 1e9,
            back / 1e9,
        )
        return ratio


def build_step_offload(
    run: RunConfig,
    model: GPTModel,
    groups: Groups,
    timeline: Timeline,
    parameter_of: Callable[[Tensor], Tensor | None],
    moved: Collection[int] = (),
) -> StepOffload | None:
    """What the flags ask for, or where they leave it to be chosen, the `moved` layers; None where nothing moves.

    parameter_of: the parameter that a tensor is a part of, if that comes and goes (`DataParallel.parameter_of`). Raises
    ConfigError for --offload-dir on CUDA.
    """
    kind = run.activation_offload.kind
    if kind is None and not moved:
        return None
    device = next(model.parameters()).device
    far, copier = copying(run, device, timeline)
    layers = list(model.decoder.layers.values())
    policy = _policy(run)
    if moved:
        policy = ChosenLayers(
            {
                number: [place for place, layer in enumerate(stage.layers) if layer in moved]
                for number, stage in model.stages.items()
            }
        )
    if isinstance(policy, ByModules):
        policy.mark(layers)
    layers_of_stage = {number: len(stage.layers) for number, stage in model.stages.items()}
    offload = ActivationOffload(policy, copier, far, model, layers_of_stage, device, parameter_of)
    mark_layers(offload, layers)
    finds_ratio = kind == "ratio" and run.activation_offload.ratio is None
    return StepOffload(offload, groups, measured_bandwidth(copier, far, device) if finds_ratio else None)


def copying(run: RunConfig, device: torch.device, timeline: Timeline) -> tuple[FarMemory, Copier]:
    """Where activations or weights move to, and by what means. Raises ConfigError for --offload-dir on CUDA."""
    directory = run.optimizer_offload.offload_dir
    on_cuda = device.type == "cuda"
    if on_cuda and directory is not None:
        raise ConfigError(
            f"--offload-dir {directory} does not take activations and weights of a CUDA device, which has to copy to "
            "page-locked memory; remove it, or the offload of activations and weights"
        )
    far = FarMemory(pinned=on_cuda, directory=None if directory is None else Path(directory))
    copier: Copier = StreamCopier(device, timeline) if on_cuda else ThreadCopier(timeline)
    return far, copier


def _policy(run: RunConfig) -> Policy:
    config = run.activation_offload
    if config.cpu_offloading:
        return FirstLayers(config.cpu_offloading_num_layers)
    if config.fine_grained_activation_offloading:
        return ByModules(config.offload_modules or ())
    return ByRatio(config.ratio or 0.0)  # auto finds its own


def _stage_times(spans: list[Interval], offload: ActivationOffload) -> dict[int, StageTimes]:
    """Of the stages of this rank: medians over the microbatches of a step."""

    def seconds(kind: Kind, stage: int) -> float:
        found = [span.stop - span.start for span in spans if span.row == kind.value and span.name == str(stage)]
        return median(found) if found else 0.0

    times = {}
    for stage, nbytes in offload.bytes_of_stage.items():
        input_grad = seconds(Kind.INPUT_GRAD, stage)
        times[stage] = StageTimes(
            forward=seconds(Kind.FORWARD, stage),
            backward=seconds(Kind.BACKWARD, stage) + input_grad + seconds(Kind.WEIGHT_GRAD, stage),
            input_grad=input_grad,
            nbytes=nbytes,
            layers=offload.layers_of_stage[stage],
        )
    return times


@functools.lru_cache(maxsize=16)
def _with_offload(schedule: Schedule) -> Schedule:
    """Runs are made of few numbers of microbatches."""
    return with_offload(schedule)
