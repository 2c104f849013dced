"""The one line that a search ends with if it finds no layout: what excludes all, and the nearest that works."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.base.errors import ConfigError
from megatron.config.run import RunConfig, flag_name
from megatron.planner.search.layout import AXES
from megatron.planner.search.nothing import ChosenValues, Freed, Remedies, broken_rules, freed_axes, remedies_of
from megatron.planner.search.search import SearchResult
from megatron.planner.time.hardware import GIB
from megatron.tooling.plan.request import SearchRequest
from megatron.tooling.plan.words import mesh_words, method_words

LARGEST = 3  # kinds of memory that are named


def none_is_accepted(request: SearchRequest, chosen: ChosenValues) -> ConfigError:
    """Returns the error of a search whose flags exclude all layouts."""
    freed = freed_axes(request.run, request.world_size, chosen)
    if not freed:
        broken = broken_rules(request.run, request.world_size, chosen)
        first = f", the plainest because {broken[0]}" if broken else ""
        return ConfigError(f"the flags exclude all layouts on {request.world_size} ranks{first}")
    return ConfigError(f"no layout on {request.world_size} ranks is left; what would do: {_changes(request, freed)}")


def none_fits(request: SearchRequest, chosen: ChosenValues, result: SearchResult) -> ConfigError:
    """Returns the error of a search all of whose layouts need too much memory."""
    limit, planned = request.planner(request.world_size).limit, result.least
    assert planned is not None
    remedies = remedies_of(request.planner, request.world_size, chosen)
    fullest = max(planned.ranks, key=lambda rank: rank.peak)
    kinds = sorted(fullest.at_peak.items(), key=lambda item: -item[1])[:LARGEST]
    layout = planned.layout
    return ConfigError(
        f"no layout fits {limit / GIB:.0f} GiB on {request.world_size} {request.cluster.device.name}: the least is "
        f"{planned.memory / GIB:.1f} GiB, {(planned.memory - limit) / GIB:.1f} too much ("
        f"{mesh_words(layout, request.world_size)}; {method_words(layout, request.world_size)}; most of it "
        f"{', '.join(f'{kind} {nbytes / GIB:.1f}' for kind, nbytes in kinds)}); {_remedy(request, remedies)}"
    )


def typed_flags(run: RunConfig, freed: Freed) -> str:
    """Returns the flag that fixed an axis, as typed, or the word of --space."""
    typed = [name for name in AXES[freed.axis].flags if name in run.given]
    if typed:
        value = run.value(typed[0])
        return flag_name(typed[0]) if isinstance(value, bool) else f"{flag_name(typed[0])} {_shown(value)}"
    return f"--space {freed.axis}={_shown(freed.fixed)}"


def _remedy(request: SearchRequest, remedies: Remedies) -> str:
    ways = [_changes(request, remedies.freed)] if remedies.freed else []
    if remedies.ranks is not None:
        ways.append(f"{remedies.ranks} {request.cluster.device.name}")
    return f"what would do: {', or '.join(ways)}" if ways else "give devices with more memory, or a smaller model"


def _changes(request: SearchRequest, freed: Sequence[Freed]) -> str:
    return ", or ".join(f"{_shown(axis.nearest)} instead of {typed_flags(request.run, axis)}" for axis in freed)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
