"""Offload of a run's activations and weights, built from its flags, and --pipeline-offload-ratio auto."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from statistics import median

from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.base.log import get_logger
from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.core.comm.collectives import gather_objects
from megatron.core.groups import Groups
from megatron.core.models.gpt import GPTModel
from megatron.core.offload.activations import ActivationOffload, attach_to_layers
from megatron.core.offload.bandwidth import measure_bandwidth
from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.host_pool import HostPool
from megatron.core.offload.policies import ByModules, ByRatio, ChosenLayers, OffloadPolicy
from megatron.core.offload.weights import WeightOffload
from megatron.core.streams.streams import Streams
from megatron.core.timeline import FinishedSpan, Timeline
from megatron.planner.memory.activation_offload import StageTimes, largest_hidden_ratio
from megatron.schedule.offload_pass import moved_groups
from megatron.schedule.schedule import Kind, Schedule
from megatron.training.microbatches import Microbatches, tensors_of

log = get_logger(__name__)
_MEASURED_STEP = 2  # of this process; the first step also warms up


class StepOffload:
    """Activation offload of training steps: adds the actions to their schedules, and wraps their computations."""

    def __init__(
        self, actions: ActivationOffload, groups: Groups, bandwidth: tuple[float, float] | None = None
    ) -> None:
        """`bandwidth`: bytes per second to the host and to the device, if the ratio is to be measured; nothing is
        offloaded until then."""
        self.actions, self._groups, self._bandwidth, self._steps = actions, groups, bandwidth, 0
        self._clock = Timeline(actions.device)
        self._schedule: Schedule | None = None

    @property
    def in_schedule(self) -> bool:
        """Whether the next step's schedule holds offload actions."""
        return self.actions.policy.schedule_ratio > 0.0

    def begin_step(self, schedule: Schedule, microbatches: Microbatches) -> None:
        """See StepPart. Tensors of the microbatches live through the step, and are not offloaded."""
        self._schedule, self._steps = schedule, self._steps + 1
        if self._bandwidth is not None and self._steps == _MEASURED_STEP:
            self._clock.start()
        moved = moved_groups(schedule.actions[self._groups.pp.rank])
        self.actions.begin_step(moved, tensors_of(microbatches.local, microbatches.targets))

    def end_step(self) -> None:
        """See StepPart. Communication: once, if the ratio is measured, a gather over the world."""
        self.actions.end_step()
        if self._bandwidth is not None and self._steps == _MEASURED_STEP:
            ratio = self._measured_ratio(self._bandwidth)
            self.actions.policy, self._bandwidth = ByRatio(ratio), None

    @contextlib.contextmanager
    def forward(self, stage: int, microbatch: int, received: Tensor | None) -> Iterator[Tensor | None]:
        """Run a forward in the body, on the yielded tensor instead of `received`."""
        with self._clock.span(Kind.FORWARD.value, str(stage)), self.actions.forward(stage, microbatch, received) as x:
            yield x

    @contextlib.contextmanager
    def backward(self, kind: Kind, stage: int) -> Iterator[None]:
        """Run a backward, or half of a split one, in the body."""
        self.actions.begin_backward()
        with self._clock.span(kind.value, str(stage)):
            yield

    def _measured_ratio(self, bandwidth: tuple[float, float]) -> float:
        """The largest ratio whose copies are fully overlapped, the same on all ranks."""
        assert self._schedule is not None
        local_times = _stage_times(self._clock.stop(), self.actions)
        slowest: list[float] = [float("inf"), float("inf")]
        stages: dict[int, StageTimes] = {}
        for times, measured in gather_objects((local_times, bandwidth), self._groups.world):
            slowest = [min(pair) for pair in zip(slowest, measured, strict=True)]
            # Replicas of a stage differ by noise: the fastest has the least time for its copies.
            for stage, stage_times in times.items():
                if stage not in stages or stage_times.forward < stages[stage].forward:
                    stages[stage] = stage_times
        to_host, to_device = slowest
        ratio = largest_hidden_ratio(self._schedule, [stages[number] for number in sorted(stages)], to_host, to_device)
        log.info(
            "--pipeline-offload-ratio auto is %.2f from now on: a stage saves %.1f MiB per microbatch in %.2f ms, and "
            "copies run at %.1f GB/s to the host and %.1f GB/s to the device",
            ratio,
            max(stage.nbytes for stage in stages.values()) / 2**20,
            1e3 * max(stage.forward for stage in stages.values()),
            to_host / 1e9,
            to_device / 1e9,
        )
        return ratio


def build_step_offload(
    config: ActivationOffloadConfig,
    directory: str | None,
    model: GPTModel,
    groups: Groups,
    streams: Streams,
    parameter_of: Callable[[Tensor], Tensor | None],
    offloaded: Collection[int] = (),
) -> StepOffload | None:
    """Activation offload as the flags ask for it, or of the `offloaded` layers that balanced recompute chose; None if
    nothing is offloaded.

    directory: --offload-dir. parameter_of: `DataParallel.parameter_of`. Raises ConfigError for --offload-dir on CUDA.
    """
    kind = config.kind
    if kind is None and not offloaded:
        return None
    pool, engine = build_pool_and_engine(directory, streams)
    layers = list(model.decoder.layers.values())
    policy = _policy(config, model, offloaded)
    if isinstance(policy, ByModules):
        policy.attach(layers)
    layers_of_stage = {number: len(stage.layers) for number, stage in model.stages.items()}
    actions = ActivationOffload(policy, engine, pool, model, layers_of_stage, streams.device, parameter_of)
    attach_to_layers(actions, layers)
    measures_ratio = kind == "ratio" and config.ratio is None
    return StepOffload(actions, groups, measure_bandwidth(engine, pool, streams.device) if measures_ratio else None)


def build_weight_offload(
    config: ActivationOffloadConfig, directory: str | None, model: GPTModel, streams: Streams
) -> WeightOffload | None:
    """Offload of the first --cpu-offloading-num-layers layers of each stage; None without --cpu-offloading-weights.

    Has a pool and an engine of its own, because the pool of activations is reclaimed every step. Raises ConfigError for
    --offload-dir on CUDA.
    """
    count = config.offloaded_weight_layers
    if not count:
        return None
    layers = [layer for stage in model.stages.values() for layer in stage.layers[:count]]
    names = [
        f"decoder.layers.{layer}.{name}"
        for layer in layers
        for name, _ in model.decoder.layers[str(layer)].named_parameters()
    ]
    return WeightOffload(names, *build_pool_and_engine(directory, streams))


def build_pool_and_engine(directory: str | None, streams: Streams) -> tuple[HostPool, CopyEngine]:
    """Host memory and copies for activations or weights. Raises ConfigError for --offload-dir on CUDA."""
    on_cuda = streams.device.type == "cuda"
    if on_cuda and directory is not None:
        raise ConfigError(
            f"--offload-dir {directory} cannot hold activations or weights of a CUDA device, whose copies need "
            "page-locked memory; remove it, or the offload of activations and weights"
        )
    return HostPool(pinned=on_cuda, directory=None if directory is None else Path(directory)), CopyEngine(streams)


def _policy(config: ActivationOffloadConfig, model: GPTModel, offloaded: Collection[int]) -> OffloadPolicy:
    stages = model.stages.items()
    if offloaded:
        return ChosenLayers(
            {number: [i for i, layer in enumerate(stage.layers) if layer in offloaded] for number, stage in stages}
        )
    if config.cpu_offloading:
        return ChosenLayers({number: range(config.cpu_offloading_num_layers) for number, _ in stages})
    if config.fine_grained_activation_offloading:
        return ByModules(config.offload_modules or ())
    return ByRatio(config.ratio or 0.0)  # auto is measured later


def _stage_times(spans: list[FinishedSpan], offload: ActivationOffload) -> dict[int, StageTimes]:
    """Times of this rank's stages: medians over the microbatches of a step."""

    def seconds(kind: Kind, stage: int) -> float:
        durations = [span.stop - span.start for span in spans if span.row == kind.value and span.name == str(stage)]
        return median(durations) if durations else 0.0

    times = {}
    for stage, nbytes in offload.saved_bytes.items():
        input_grad = seconds(Kind.INPUT_GRAD, stage)
        times[stage] = StageTimes(
            forward=seconds(Kind.FORWARD, stage),
            backward=seconds(Kind.BACKWARD, stage) + input_grad + seconds(Kind.WEIGHT_GRAD, stage),
            input_grad=input_grad,
            nbytes=nbytes,
            layers=offload.layers_of_stage[stage],
        )
    return times
