"""--recompute-policy balanced: choose per layer what to keep, recompute or offload, from measured times and bytes.

Before the model is built, one layer of each kind runs on random numbers of a microbatch's shape, apart from the model:
bytes that autograd saves are counted, forward and backward are timed with and without each part recomputed, and so are
copies to host memory. planner/memory/rank_choice.py then chooses for every layer of this rank.
None of this changes a result.

Offloading saves nothing where the device computes in host memory, so on the CPU layers are offloaded only to files, if
--offload-dir is given.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.base.log import get_logger
from megatron.config.data import DataConfig
from megatron.config.recompute import KEEP_ALL, RecomputeConfig
from megatron.config.train import TrainConfig
from megatron.core.comm.collectives import all_reduce
from megatron.core.groups import Groups
from megatron.core.offload.bandwidth import measure_bandwidth
from megatron.core.streams.streams import Streams
from megatron.core.transformer.context import Build
from megatron.planner.memory.balance import Option
from megatron.planner.memory.front_report import draw, table
from megatron.planner.memory.rank_choice import CopyTimes, LayerOption, LayerTimes, RankChoice, choose, with_offload
from megatron.planner.memory.recompute_options import RECOMPUTE_WHOLE_LAYER, option_name, part_sets, parts
from megatron.schedule.partition import Stage
from megatron.schedule.schedule import Schedule
from megatron.schedule.validate import memory_in_flight
from megatron.spec.decoder import LayerSpec
from megatron.training.offload import build_pool_and_engine
from megatron.training.probe import LayerProbe, PhaseLaps

log = get_logger(__name__)

_ROUNDS = 7  # timed rounds, after a warm-up


def choose_by_measuring(
    recompute: RecomputeConfig,
    data: DataConfig,
    train: TrainConfig,
    offload_dir: str | None,
    build: Build,
    stages: Sequence[Stage],
    schedule: Schedule,
    streams: Streams,
) -> RankChoice:
    """Measures the layers of this rank's `stages` and chooses. Raises ConfigError for too small a budget.

    schedule: of a training step. offload_dir: --offload-dir.

    Communication: that of the layers, and two max all-reduces of some numbers: the ranks of a stage choose alike.
    """
    groups, rates = build.groups, _seconds_per_byte(offload_dir, streams)
    numbers = [number for stage in stages for number in stage.layers]
    kinds = {number: _kind(build, number) for number in numbers}
    first = {kind: number for number, kind in reversed(kinds.items())}
    measured = {kind: _measure(data, train, build, number, rates) for kind, number in first.items()}
    budget = recompute.activation_memory_budget
    assert budget is not None
    choice = choose(
        {number: measured[kind].options for number, kind in kinds.items()},
        stages,
        groups.pp.rank,
        memory_in_flight(schedule)[groups.pp.rank].activations,
        budget,
    )
    seconds = sum(sum(measured[kind].times) for kind in kinds.values())
    _report(recompute.activation_memory_plot, groups, choice, seconds)
    return choice


def _report(path: str | None, groups: Groups, chosen: RankChoice, seconds: float) -> None:
    if not chosen.options:
        log.info("pipeline rank 0 has no layers, so there is nothing to choose for it")
        return
    log.info("what layers of pipeline rank 0 may keep for backward, and the time it costs them:")
    for line in table(chosen.front, chosen.choice, chosen.budget, seconds):
        log.info("%s", line)
    if path is not None and groups.rank == 0:
        try:
            draw(Path(path), chosen.front, chosen.choice, chosen.budget, seconds)
        except OSError as error:  # the run goes on
            log.warning("--activation-memory-plot %s could not be written: %s", path, error.strerror)


def _kind(build: Build, number: int) -> tuple[LayerSpec, str]:
    """Layers of one kind cost the same."""
    comm_type = build.cp_comm_types[number] if build.cp_comm_types else ""
    return build.spec.layers[number], comm_type


class Measured(NamedTuple):
    """The options of a layer, and the times of its forward and backward without recompute."""

    options: list[LayerOption]
    times: LayerTimes


def _measure(data: DataConfig, train: TrainConfig, build: Build, number: int, rates: CopyTimes | None) -> Measured:
    """Measures a layer. rates: seconds per byte, if layers may be offloaded."""
    sets = part_sets(build.spec.layers[number])
    # Each part is timed alone; of several together the times add up.
    timed = [*(config for config in sets if len(config.modules) == 1), RECOMPUTE_WHOLE_LAYER]
    with build.rng.replay(build.rng.snapshot()):  # the run draws the numbers it would draw anyway
        keep = LayerProbe(data, train, build, number, KEEP_ALL)
        added: list[float] = []
        base: list[PhaseLaps] = []
        for config in timed:
            probe = LayerProbe(data, train, build, number, config)
            pairs = [(keep.laps(), probe.laps()) for _ in range(_ROUNDS + 1)][1:]
            base += [without for without, _ in pairs]
            added.append(statistics.median(repeated.seconds - without.seconds for without, repeated in pairs))
        sizes = [
            LayerProbe(data, train, build, number, config).saved_bytes() for config in (*sets, RECOMPUTE_WHOLE_LAYER)
        ]
    forward = statistics.median(laps.forward.device for laps in base)
    backward = statistics.median(laps.seconds - laps.forward.device for laps in base)
    numbers = [forward, backward, *(rates or (0.0, 0.0)), *added, *map(float, sizes)]
    largest = torch.tensor(numbers, dtype=torch.float64, device=build.device).clamp_(min=0.0)
    for group in (build.groups.tp, build.groups.dp_cp):
        all_reduce(largest, group, "max")
    forward, backward, to_host, to_device, *values = largest.tolist()
    added, sizes = values[: len(timed)], [int(size) for size in values[len(timed) :]]  # rows of experts differ by rank
    seconds = {str(config): cost for config, cost in zip(timed, added, strict=True)}
    options = [
        LayerOption(
            Option(option_name(config), size, sum(seconds[str(parts(name))] for name in config.modules)), config
        )
        for config, size in zip(sets, sizes, strict=False)
    ]
    whole = Option("layer", sizes[-1], seconds[str(RECOMPUTE_WHOLE_LAYER)])
    options.append(LayerOption(whole, RECOMPUTE_WHOLE_LAYER))
    times = LayerTimes(forward, backward)
    if rates is not None:
        options = with_offload(options, times, lambda nbytes: CopyTimes(nbytes * to_host, nbytes * to_device))
    return Measured(options, times)


def _seconds_per_byte(directory: str | None, streams: Streams) -> CopyTimes | None:
    """Seconds per byte of copies to the host and to the device; None where layers are not offloaded."""
    if streams.device.type != "cuda" and directory is None:
        return None
    pool, engine = build_pool_and_engine(directory, streams)
    to_host, to_device = measure_bandwidth(engine, pool, streams.device)
    return CopyTimes(1 / to_host, 1 / to_device)
