"""What --recompute-policy balanced will choose for each layer, by planned bytes and times in place of measured ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.config.recompute import LayerChoices, RecomputeConfig
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.planner.memory.balance import Option
from megatron.planner.memory.rank_choice import CopyTimes, LayerOption, LayerTimes, choose, with_offload
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


@dataclass(frozen=True)
class BalancedLayers:
    """The choice for every layer of a run. offloaded: layer -> bytes of its activations that go to host memory."""

    choices: LayerChoices
    offloaded: Mapping[int, int]


def balanced_layers(
    run: RunConfig, settings: RunSettings, software: Software, clock: Clock, places: Places
) -> BalancedLayers:
    """Returns what a run with --recompute-policy balanced will choose. Raises ConfigError for too small a budget.

    The clock's times are numbers. Layers are offloaded if they may be in the run: where the device has memory of its
    own.
    """
    pipeline, budget = settings.pipeline, run.recompute.activation_memory_budget
    assert budget is not None
    work = model_work(run, settings, software)
    in_flight = memory_in_flight(pipeline.schedule_of(settings.batches.final_num_microbatches))
    layers = {id(layer): layer for layer in work.spec.layers}  # many layers are one object
    priced = {key: _options(run, settings, software, layer, work.sizes, clock, places) for key, layer in layers.items()}
    options_of = {number: priced[id(layer)] for number, layer in enumerate(work.spec.layers)}
    chosen: dict[int, LayerOption] = {}
    for rank in range(pipeline.placement.num_ranks):
        chosen |= choose(options_of, pipeline.stages_of(rank), rank, in_flight[rank].activations, budget).options
    offloaded = {number: option.offloaded for number, option in chosen.items() if option.offloaded}
    configs = {number: option.config for number, option in chosen.items()}
    return BalancedLayers(LayerChoices(configs, frozenset(offloaded)), offloaded)


def _options(
    run: RunConfig,
    settings: RunSettings,
    software: Software,
    layer: LayerSpec,
    sizes: Sizes,
    clock: Clock,
    places: Places,
) -> list[LayerOption]:
    """The options of a layer: sets of its parts, the whole layer, and each of them with all that it keeps offloaded."""
    overlap = overlap_of(run, settings)

    def backward(config: RecomputeConfig) -> float:
        work = layer_work(layer, sizes, software, overlap, config.modules)
        phases = clock.layer(work, places, full=config.is_full)
        return float(phases.input_grad.total + phases.weight_grad.total)

    def copy(nbytes: int) -> CopyTimes:
        seconds = float(clock.host_copy(nbytes))
        return CopyTimes(seconds, seconds)

    alone = clock.layer(layer_work(layer, sizes, software, overlap, frozenset()), places, full=False)
    times = LayerTimes(float(alone.forward.total), float(alone.input_grad.total + alone.weight_grad.total))
    options = []
    for config in (*part_sets(layer), RECOMPUTE_WHOLE_LAYER):
        memory = LayerMemory(layer, sizes, config.modules).kept_by_part()
        nbytes = sizes.residual + memory[ROUTING] if config.is_full else sum(memory.values())
        added = max(0.0, backward(config) - times.backward)
        options.append(LayerOption(Option(option_name(config), nbytes, added), config))
    return with_offload(options, times, copy)
