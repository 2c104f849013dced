"""--recompute-policy balanced: choose per layer what to keep, recompute or offload, from measured times and bytes.

Before the model is built, one layer of each kind runs on random numbers of a microbatch's shape, apart from the model: bytes
that autograd saves are counted, forward and backward are timed with and without each part recomputed, and so are copies
to host memory. planner/memory/balance.py then chooses for every layer of this rank. None of this changes a result.

[Note: cost of offloading a layer]
The time by which a copy exceeds the computation that it is overlapped with: the forward of a layer, a third of its time, for
the copy to the host, and the backward for the reload. The last layers of a stage stay on the device (RESIDENT_LAYERS in
config/activation_offload.py). Offloading saves nothing where the device computes in host memory, so on the CPU layers are
offloaded only to files, if --offload-dir is given.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.base.errors import ConfigError
from megatron.base.log import get_logger
from megatron.config.activation_offload import RESIDENT_LAYERS
from megatron.config.data import DataConfig
from megatron.config.recompute import KEEP_ALL, LayerChoices, RecomputeConfig
from megatron.config.train import TrainConfig
from megatron.core.comm.collectives import all_reduce
from megatron.core.groups import Groups
from megatron.core.offload.bandwidth import measure_bandwidth
from megatron.core.streams.streams import Streams
from megatron.core.transformer.context import Build
from megatron.planner.memory.balance import Choice, Option, cheapest, front
from megatron.planner.memory.front_report import MIB, draw, table
from megatron.planner.memory.recompute_options import RECOMPUTE_WHOLE_LAYER, option_name, part_sets, parts
from megatron.schedule.partition import Stage
from megatron.schedule.schedule import Schedule
from megatron.schedule.validate import memory_in_flight
from megatron.spec.decoder import LayerSpec
from megatron.training.offload import build_pool_and_engine
from megatron.training.probe import LayerProbe

log = get_logger(__name__)

_ROUNDS = 7  # timed rounds, after a warm-up


class Balanced(NamedTuple):
    """The choice for every layer of this rank, and its cost.

    choice: bytes of all microbatches held at once, seconds of one. keep: bytes if nothing is recomputed or offloaded.
    """

    layers: LayerChoices
    choice: Choice
    keep: int

    def __str__(self) -> str:
        """Number of layers per option, for the start-up table."""
        return ", ".join(f"{count} x {name}" for name, count in self.choice.counts().items())


def choose(
    recompute: RecomputeConfig,
    data: DataConfig,
    train: TrainConfig,
    offload_dir: str | None,
    build: Build,
    stages: Sequence[Stage],
    schedule: Schedule,
    streams: Streams,
) -> Balanced:
    """Measures the layers of this rank's `stages` and chooses. Raises ConfigError for too small a budget.

    schedule: of a training step. offload_dir: --offload-dir.

    Communication: that of the layers, and two max all-reduces of some numbers: the ranks of a stage choose alike.
    """
    groups, rates = build.groups, _seconds_per_byte(offload_dir, streams)
    numbers = [number for stage in stages for number in stage.layers]
    kinds = {number: _kind(build, number) for number in numbers}
    first = {kind: number for number, kind in reversed(kinds.items())}
    measured = {kind: _measure(data, train, build, number, rates) for kind, number in first.items()}
    resident = {number for stage in stages for number in list(stage.layers)[-RESIDENT_LAYERS:]}
    # A chunk of a microbatch keeps what its own stage's layers keep.
    at_once = memory_in_flight(schedule)[groups.pp.rank].activations / max(1, len(stages))
    options = [
        [way.option.held(at_once) for way in measured[kinds[number]][0] if not (way.offloads and number in resident)]
        for number in numbers
    ]
    ways = {way.option.name: way for found, _ in measured.values() for way in found}
    choices = front(options)
    keep = sum(found[0].nbytes for found in options)  # nothing is recomputed
    asked = recompute.activation_memory_budget
    assert asked is not None
    budget = asked * keep if asked <= 1 else asked
    chosen = cheapest(choices, budget)
    if chosen is None:
        raise ConfigError(
            f"--activation-memory-budget {asked:g} is {budget / MIB:.1f} MiB on pipeline rank {groups.pp.rank}, whose "
            f"layers keep {choices[-1].nbytes / MIB:.1f} MiB at the least; give that much, or a smaller "
            "--micro-batch-size"
        )
    seconds = sum(measured[kind][1] for kind in kinds.values())
    _report(recompute.activation_memory_plot, groups, choices, chosen, budget, seconds)
    picked = {number: ways[option.name] for number, option in zip(numbers, chosen.options, strict=True)}
    configs = {number: way.config for number, way in picked.items()}
    offloaded = frozenset(number for number, way in picked.items() if way.offloads)
    return Balanced(LayerChoices(configs, offloaded), chosen, keep)


def _report(
    path: str | None, groups: Groups, choices: list[Choice], chosen: Choice, budget: float, seconds: float
) -> None:
    if not chosen.options:
        log.info("pipeline rank 0 has no layers, so there is nothing to choose for it")
        return
    log.info("what layers of pipeline rank 0 may keep for backward, and the time it costs them:")
    for line in table(choices, chosen, budget, seconds):
        log.info("%s", line)
    if path is not None and groups.rank == 0:
        try:
            draw(Path(path), choices, chosen, budget, seconds)
        except OSError as error:  # the run goes on
            log.warning("--activation-memory-plot %s could not be written: %s", path, error.strerror)


def _kind(build: Build, number: int) -> tuple[LayerSpec, str]:
    """Layers of one kind cost the same."""
    comm_type = build.cp_comm_types[number] if build.cp_comm_types else ""
    return build.spec.layers[number], comm_type


class Way(NamedTuple):
    """An option of a layer and its recompute flags. offloads: what the layer saves is offloaded to host memory."""

    option: Option
    config: RecomputeConfig
    offloads: bool = False


def _measure(
    data: DataConfig, train: TrainConfig, build: Build, number: int, rates: tuple[float, float] | None
) -> tuple[list[Way], float]:
    """The options of a layer, and the seconds of its forward and backward without any.

    rates: seconds per byte to the host and to the device, if layers may be offloaded.
    """
    sets = part_sets(build.spec.layers[number])
    # Each part is timed alone; of several together the times add up.
    timed = [*(config for config in sets if len(config.modules) == 1), RECOMPUTE_WHOLE_LAYER]
    with build.rng.replay(build.rng.snapshot()):  # the run draws the numbers it would draw anyway
        keep = LayerProbe(data, train, build, number, KEEP_ALL)
        added: list[float] = []
        base: list[float] = []
        for config in timed:
            probe = LayerProbe(data, train, build, number, config)
            pairs = [(keep.laps().seconds, probe.laps().seconds) for _ in range(_ROUNDS + 1)][1:]
            base += [without for without, _ in pairs]
            added.append(statistics.median(again - without for without, again in pairs))
        kept = [
            LayerProbe(data, train, build, number, config).saved_bytes() for config in (*sets, RECOMPUTE_WHOLE_LAYER)
        ]
    found = [*added, statistics.median(base), *(rates or (0.0, 0.0)), *map(float, kept)]
    times = torch.tensor(found, dtype=torch.float64, device=build.device).clamp_(min=0.0)
    for group in (build.groups.tp, build.groups.dp_cp):
        all_reduce(times, group, "max")
    *added, alone, out, back = times[: len(timed) + 3].tolist()
    sizes = [
        int(each) for each in times[len(timed) + 3 :].tolist()
    ]  # with experts ranks keep different numbers of rows
    seconds = {str(config): cost for config, cost in zip(timed, added, strict=True)}
    ways = [
        Way(Option(option_name(config), size, sum(seconds[str(parts(name))] for name in config.modules)), config)
        for config, size in zip(sets, sizes, strict=False)
    ]
    ways.append(Way(Option("layer", sizes[-1], seconds[str(RECOMPUTE_WHOLE_LAYER)]), RECOMPUTE_WHOLE_LAYER))
    if rates is not None:
        ways += [Way(_offloaded(way.option, alone, out, back), way.config, offloads=True) for way in ways]
    return ways, alone


def _offloaded(option: Option, alone: float, out: float, back: float) -> Option:
    """The same option with everything that it keeps offloaded; see the note."""
    exposed = max(0.0, option.nbytes * out - alone / 3) + max(0.0, option.nbytes * back - 2 * alone / 3)
    return Option(f"{option.name} (offloaded)", 0, option.seconds + exposed)


def _seconds_per_byte(directory: str | None, streams: Streams) -> tuple[float, float] | None:
    """Seconds per byte of copies to the host and to the device; None where layers are not offloaded."""
    if streams.device.type != "cuda" and directory is None:
        return None
    pool, engine = build_pool_and_engine(directory, streams)
    to_host, to_device = measure_bandwidth(engine, pool, streams.device)
    return 1 / to_host, 1 / to_device
