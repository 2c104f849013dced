"""What --recompute-policy balanced will choose for each layer, by planned bytes and times in place of measured ones.

The options and the choice are those of the run itself (training/balanced_recompute.py, memory/balance.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron.base.errors import ConfigError
from megatron.config.activation_offload import RESIDENT_LAYERS
from megatron.config.recompute import LayerChoices, RecomputeConfig
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.planner.memory.balance import Option, cheapest, front
from megatron.planner.memory.recompute_options import RECOMPUTE_WHOLE_LAYER, option_name, part_sets
from megatron.planner.time.clock import Clock, Places
from megatron.planner.time.model_work import model_work, overlap_of
from megatron.planner.time.operations import layer_work
from megatron.planner.time.software import Software
from megatron.schedule.validate import memory_in_flight
from megatron.spec.decoder import LayerSpec
from megatron.spec.memory.layer import LayerMemory
from megatron.spec.memory.trace import ROUTING
from megatron.spec.sizes import Sizes

_MIB = 2**20


@dataclass(frozen=True)
class BalancedLayers:
    """The choice for every layer of a run. offloaded: layer -> bytes of its activations that go to host memory."""

    choices: LayerChoices
    offloaded: Mapping[int, int]


@dataclass(frozen=True)
class _Way:
    """An option of a layer and its recompute flags. offloaded: bytes that go to host memory."""

    option: Option
    config: RecomputeConfig
    offloaded: int = 0


def balanced_layers(
    run: RunConfig, settings: RunSettings, software: Software, clock: Clock, places: Places
) -> BalancedLayers:
    """Returns what a run with --recompute-policy balanced will choose. Raises ConfigError for too small a budget.

    The clock's times are numbers. Layers are offloaded if they may be in the run: where the device has memory of its own.
    """
    pipeline, budget = settings.pipeline, run.recompute.activation_memory_budget
    assert budget is not None
    work = model_work(run, settings, software)
    in_flight = memory_in_flight(pipeline.schedule_of(settings.batches.final_num_microbatches))
    ways_of: dict[int, list[_Way]] = {}  # of layers that are one object
    picked: dict[int, _Way] = {}
    for rank in range(pipeline.placement.num_ranks):
        stages = pipeline.stages_of(rank)
        numbers = [number for stage in stages for number in stage.layers]
        resident = {number for stage in stages for number in list(stage.layers)[-RESIDENT_LAYERS:]}
        at_once = in_flight[rank].activations / max(1, len(stages))
        found = []
        for number in numbers:
            layer = work.spec.layers[number]
            if id(layer) not in ways_of:
                ways_of[id(layer)] = list(_ways(run, settings, software, layer, work.sizes, clock, places))
            ways = ways_of[id(layer)]
            found.append([way for way in ways if not (way.offloaded and number in resident)])
        options = [[way.option.held(at_once) for way in ways] for ways in found]
        keep = sum(each[0].nbytes for each in options)  # nothing is recomputed
        limit = budget * keep if budget <= 1 else budget
        choices = front(options)
        chosen = cheapest(choices, limit)
        if chosen is None:
            raise ConfigError(
                f"--activation-memory-budget {budget:g} is {limit / _MIB:.1f} MiB on pipeline rank {rank}, whose layers "
                f"keep {choices[-1].nbytes / _MIB:.1f} MiB at the least; give that much, or a smaller --micro-batch-size"
            )
        for number, ways, option in zip(numbers, found, chosen.options, strict=True):
            picked[number] = next(way for way in ways if way.option.name == option.name)
    offloaded = {number: way.offloaded for number, way in picked.items() if way.offloaded}
    configs = {number: way.config for number, way in picked.items()}
    return BalancedLayers(LayerChoices(configs, frozenset(offloaded)), offloaded)


def _ways(
    run: RunConfig,
    settings: RunSettings,
    software: Software,
    layer: LayerSpec,
    sizes: Sizes,
    clock: Clock,
    places: Places,
) -> Iterator[_Way]:
    """The options of a layer: sets of its parts, the whole layer, and each of them with all that it keeps offloaded."""
    overlap = overlap_of(run, settings)

    def backward(config: RecomputeConfig) -> float:
        work = layer_work(layer, sizes, software, overlap, config.modules)
        phases = clock.layer(work, places, full=config.is_full)
        return float(phases.input_grad.total + phases.weight_grad.total)

    alone = clock.layer(layer_work(layer, sizes, software, overlap, frozenset()), places, full=False)
    times = float(alone.forward.total), float(alone.input_grad.total + alone.weight_grad.total)
    ways = []
    for config in (*part_sets(layer), RECOMPUTE_WHOLE_LAYER):
        memory = LayerMemory(layer, sizes, config.modules).kept_by_part()
        nbytes = sizes.residual + memory[ROUTING] if config.is_full else sum(memory.values())
        ways.append(_Way(Option(option_name(config), nbytes, max(0.0, backward(config) - times[1])), config))
    yield from ways
    for way in ways:
        copy = float(clock.host_copy(way.option.nbytes))
        seconds = way.option.seconds + sum(max(0.0, copy - time) for time in times)
        yield _Way(Option(f"{way.option.name} (offloaded)", 0, seconds), way.config, way.option.nbytes)
