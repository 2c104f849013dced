"""The conditions of the space of layouts: the rules of `config.rules`, and those that leave one layout of several
alike.

A condition is asked about some layouts, and its answer holds for all that agree in the axes that it has read. So the
rules themselves decide about many layouts, and nothing here repeats them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from megatron.base.errors import ConfigError
from megatron.config.data_parallel import AUTO, LAST, splits_backward
from megatron.config.mesh import mesh_of
from megatron.config.recompute import FULL
from megatron.config.rules.check import rules
from megatron.config.rules.needs import flag_has_an_effect, missing_need, own_flags_have_an_effect
from megatron.config.rules.ranges import numbers_are_in_range, values_are_known
from megatron.config.run import RunConfig, flag_fields
from megatron.planner.search.axis import HIERARCHICAL, SHARDED_GRADS
from megatron.planner.search.layout import AXES, FIELDS, Layout
from megatron.schedule.registry import SCHEDULES
from megatron.schedule.schedules.interleaved import group_sizes

AxisValues = Mapping[str, tuple[Any, ...]]
Condition = Callable[[], str | None]  # returns the problem
_Layers = Callable[..., tuple[int, ...]]

NEUTRAL = Layout()
# They read every field, and each of them for itself: so they are asked once.
_OF_EVERY_FIELD = (values_are_known, numbers_are_in_range, own_flags_have_an_effect)


class AskedLayout:
    """Stands for a Layout, and collects in `read` the axes that are read. `values`: of all axes."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = dataclasses.asdict(NEUTRAL)
        self.read: set[str] = set()

    def __getattr__(self, axis: str) -> Any:
        try:
            value = self.values[axis]
        except KeyError:
            raise AttributeError(axis) from None
        self.read.add(axis)
        return value


def asked_run(run: RunConfig, asked: AskedLayout) -> RunConfig:
    """Returns a run whose fields that a layout sets are computed when they are read, for the present values of
    `asked`."""
    names: dict[str, list[str]] = {}
    for name in FIELDS:
        names.setdefault(flag_fields()[name][0], []).append(name)
    parts = {}
    for part, fields in names.items():
        real = getattr(run, part)
        # A property of the class wins over the instance's value, and the methods of the class read it, too.
        of_layout = {name: _computed(FIELDS[name], cast(Layout, asked), run) for name in fields}
        stand_in: Any = object.__new__(type(f"Asked{type(real).__name__}", (type(real),), of_layout))
        stand_in.__dict__.update({name: value for name, value in vars(real).items() if name not in of_layout})
        parts[part] = stand_in
    return dataclasses.replace(run, given=run.given - FIELDS.keys(), **parts)


def _computed(field: Callable[[Layout, RunConfig], Any], layout: Layout, run: RunConfig) -> property:
    return property(lambda part: field(layout, run))


def conditions(real: RunConfig, world_size: int, choices: AxisValues, asked: AskedLayout) -> list[Condition]:
    """Returns the conditions that a layout of the run must meet: they read `asked`.

    choices: the values of each axis.
    """
    run, layout = asked_run(real, asked), cast(Layout, asked)
    conditions_of_axes = [
        *(partial(_problem, rule) for rule in rules(run, world_size) if rule.func not in _OF_EVERY_FIELD),
        *(partial(_problem, partial(flag_has_an_effect, run, name)) for name in sorted(run.given)),
        *(partial(_problem, partial(_is_default_or_has_an_effect, run, name)) for name in FIELDS),
    ]
    copies = partial(_copies, run, world_size)
    effects = {
        name: partial(described.effect, layout, copies, real)
        for name, described in AXES.items()
        if described.effect is not None
    }
    layers = functools.cache(partial(_layers_of_stages, real))
    unique = [
        *(partial(_is_chosen, layout, axis, choices[axis], has_effect) for axis, has_effect in effects.items()),
        partial(_fits_schedule, layout),
        partial(_group_is_new, run, world_size, layout, choices["group"]),
        partial(_inner_is_between, layout),
        partial(_instances_share, run, world_size, layout, choices["instances"]),
        partial(_reduces_as_sharding_needs, run, world_size, layout, choices["reduce_mode"]),
        partial(_ends_matter, layout, choices["uneven_ends"], layers),
        partial(_recompute_is_new, real, layout, choices["recompute"], layers),
    ]
    return [*conditions_of_axes, *(partial(_problem, partial(_alike, is_met)) for is_met in unique)]


def _problem(rule: Callable[[], str | None]) -> str | None:
    """The problem that the rule finds. It may fail itself where another rule is broken on which it relies."""
    try:
        return rule()
    except Exception as error:
        return str(error)


def _alike(is_met: Callable[[], bool]) -> str | None:
    return None if is_met() else "another layout is the same run"


def _is_default_or_has_an_effect(run: RunConfig, name: str) -> str | None:
    """A flag that a layout needs is not typed in vain, whether or not Megatron-LM has it."""
    is_default = run.value(name) == flag_fields()[name][1].default
    return None if is_default or missing_need(run, name) is None else f"{name} has no effect"


def _is_chosen(layout: Layout, axis: str, values: tuple[Any, ...], has_effect: Callable[[], bool]) -> bool:
    value = getattr(layout, axis)
    return value in values if has_effect() else value == getattr(NEUTRAL, axis)


def _copies(run: RunConfig, world_size: int) -> int:
    """The most ranks that hold a copy of one parameter, and between which state can be sharded."""
    mesh = mesh_of(run.parallel, world_size)
    return max(mesh.dp * mesh.cp, mesh.edp if run.model.num_experts is not None else 1)


def _instances_share(run: RunConfig, world_size: int, layout: Layout, values: tuple[int, ...]) -> bool:
    """An instance of the optimizer has several ranks. Those of one rank shard nothing."""
    return layout.instances == 1 or 1 not in values or _copies(run, world_size) > layout.instances


def _fits_schedule(layout: Layout) -> bool:
    """A schedule with its own number of virtual stages has it. Without a pipeline there is one stage, in any order."""
    if layout.pp == 1:
        return layout.schedule == NEUTRAL.schedule and layout.virtual_stages == 1
    needed = SCHEDULES[layout.schedule].virtual_stages
    return needed in (None, layout.virtual_stages)


def _group_is_new(run: RunConfig, world_size: int, layout: Layout, values: tuple[int, ...]) -> bool:
    """No smaller group among the values divides the microbatches in the same way."""
    if not layout.group:
        return True
    dp = mesh_of(run.parallel, world_size).dp
    samples = run.train.final_global_batch_size or layout.micro_batch * dp
    m = samples // (layout.micro_batch * dp)
    smaller = [value or layout.pp for value in values if value < layout.group and (value or layout.pp) >= layout.pp]
    if layout.group < layout.pp:
        return False
    sizes = group_sizes(layout.pp, m, layout.group)
    return all(group_sizes(layout.pp, m, value) != sizes for value in smaller)


def _inner_is_between(layout: Layout) -> bool:
    """An exchange of heads between one rank or all of them is another kind of context parallelism."""
    return layout.cp_kind != HIERARCHICAL or 1 < layout.cp_inner < layout.cp


def _reduces_as_sharding_needs(run: RunConfig, world_size: int, layout: Layout, values: tuple[str, ...]) -> bool:
    """Gradients of which a rank keeps a shard are reduced after every microbatch; others once, or as memory allows.
    Those without copies are not reduced."""
    if _copies(run, world_size) == 1:
        return layout.reduce_mode == NEUTRAL.reduce_mode
    if layout.sharding in SHARDED_GRADS:
        return layout.reduce_mode not in (LAST, AUTO) and layout.reduce_mode in values
    if layout.sharding == "no_shard":
        return layout.reduce_mode == LAST and LAST in values
    if layout.reduce_mode == AUTO:
        return AUTO in values and not splits_backward(run.parallel)
    measured_is_last = AUTO in values and splits_backward(run.parallel)
    return layout.reduce_mode == LAST and (LAST in values or measured_is_last)


def _ends_matter(layout: Layout, values: tuple[bool, ...], layers: _Layers) -> bool:
    """If the embedding and the loss count, the stages have other layers than if they do not."""
    if layout.pp == 1 or not layout.uneven_ends or False not in values:
        return True
    sizes = layout.pp, layout.schedule, layout.virtual_stages
    return layers(*sizes, uneven_ends=True) != layers(*sizes, uneven_ends=False)


def _recompute_is_new(run: RunConfig, layout: Layout, values: tuple[str, ...], layers: _Layers) -> bool:
    """No earlier value recomputes the same layers in the same groups, as "full" and "full:8" of a stage with 8
    layers."""
    if not layout.recompute.startswith(FULL):
        return True
    sizes = layers(layout.pp, layout.schedule, layout.virtual_stages, uneven_ends=layout.uneven_ends)
    earlier = [value for value in values[: values.index(layout.recompute)] if value.startswith(FULL)]
    groups = _groups(run, layout.recompute, sizes)
    return all(_groups(run, value, sizes) != groups for value in earlier)


def _groups(run: RunConfig, recompute: str, sizes: tuple[int, ...]) -> list[list[tuple[int, bool]]]:
    """The layers of each group, and whether they are recomputed, in stages with so many layers."""
    config = Layout(recompute=recompute).apply(run).recompute
    return [[(len(group), again) for group, again in config.groups(range(size))] for size in set(sizes)]


def _layers_of_stages(
    run: RunConfig, pp: int, schedule: str, virtual_stages: int, *, uneven_ends: bool
) -> tuple[int, ...]:
    """The number of layers of each stage; none where they do not divide."""
    layout = Layout(pp=pp, schedule=schedule, virtual_stages=virtual_stages, uneven_ends=uneven_ends)
    try:
        return tuple(len(stage.layers) for stage in layout.apply(run).pipeline_settings().stages)
    except ConfigError:
        return ()
