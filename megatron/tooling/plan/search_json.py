"""Everything that a search found as one object, with the unit of each number in its name. docs/planner.md explains
it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.planner.search.explain import Comparison, Explanation
from megatron.planner.search.search import PlannedLayout, SearchResult
from megatron.planner.time.constants import blind_error
from megatron.planner.time.groups import grouped
from megatron.planner.time.hardware import GB, GIB, TERA, used_memory
from megatron.planner.time.step_time import StepTime
from megatron.tooling.plan.layouts import days, mfu
from megatron.tooling.plan.request import SearchRequest
from megatron.tooling.plan.try_runs import Trial
from megatron.tooling.plan.words import mesh_words, method_words


@dataclass(frozen=True)
class SearchAnswer:
    """The answers of a search besides its layouts.

    number: the number of the layout whose command is printed, from 1: the one that is explained, or the fastest of a
    trial, or the first. commands: the command of each layout.
    """

    number: int
    explanation: Explanation | None
    comparison: Comparison | None
    trial: Trial | None
    commands: tuple[str, ...]


def as_object(request: SearchRequest, searched: SearchResult, answer: SearchAnswer, limit: float) -> Mapping[str, Any]:
    """Returns an object of dictionaries, lists, texts and numbers. limit: bytes of device memory that a layout may
    take."""
    cluster = request.cluster
    result: dict[str, Any] = {
        "cluster": {
            "device": cluster.device.name,
            "nodes": cluster.nodes,
            "devices_per_node": cluster.node,
            "device_memory_gib": cluster.device.memory / GIB,
            "host_memory_per_node_gib": cluster.host_memory / GIB,
            "link_gb_per_s": cluster.device.link / GB,
            "network_gb_per_s": cluster.network / GB,
        },
        "world_size": request.world_size,
        "train_tokens": request.tokens,
        "memory_limit_gib": limit / GIB,
        "median_error_percent": None if request.machine.profile is not None else blind_error(),
        "profile": request.machine.path or None,
        "mfu": f"model FLOPs of megatron/spec/flops.py over {request.machine.peak_name}",
        "added_flags": list(request.added),
        "search": {
            "considered": len(searched.candidates),
            "out_of_memory": searched.out_of_memory,
            "bounded_out": searched.bounded_out,
            "simulated": searched.simulated,
            "seconds": searched.seconds,
        },
        "layouts": [
            _layout(request, planned, number, answer.commands[number - 1])
            for number, planned in enumerate(searched.best, start=1)
        ],
    }
    if answer.explanation is not None:
        result["explanation"] = {"layout": answer.number, **_explanation(answer.explanation, searched, answer.number)}
    if answer.comparison is not None:
        result["comparison"] = _comparison(request, answer.comparison)
    if answer.trial is not None:
        result["trial"] = _trial(answer.trial)
    return result


def _trial(trial: Trial) -> Mapping[str, Any]:
    return {
        "measured_over_predicted": trial.corrected.factor,
        "fastest_first": [place + 1 for place in trial.corrected.order],
        "layouts": [
            {
                "number": place + 1,
                "predicted_step_seconds": seconds,
                "measured_step_seconds": trial.measured.get(place),
                "corrected_step_seconds": trial.corrected.seconds[place],
                "failure": trial.failed.get(place),
            }
            for place, seconds in enumerate(trial.predicted)
        ],
    }


def _layout(request: SearchRequest, planned: PlannedLayout, number: int, command: str) -> Mapping[str, Any]:
    layout, ranks = planned.layout, planned.time.ranks
    return {
        "number": number,
        "words": f"{mesh_words(layout, ranks)}; {method_words(layout, ranks)}",
        "axes": dataclasses.asdict(layout),
        **_figures(request, planned.time),
        "step_error_percent": None if request.machine.profile is not None else 100 * planned.error,
        "ranking_seconds": planned.ranking_seconds,
        "peak_memory_gib": planned.memory / GIB,
        "host_memory_gib": planned.host / GIB,
        "days": None if request.tokens is None else days(planned.time, request.tokens),
        "command": command,
    }


def _figures(request: SearchRequest, time: StepTime) -> Mapping[str, Any]:
    return {
        "step_seconds": float(time.seconds),
        "tokens_per_second_per_device": float(time.tokens_per_second),
        "model_tflops_per_second_per_device": float(time.flops_per_second) / TERA,
        "mfu_percent": 100 * mfu(time, request.cluster),
        "groups_seconds": grouped(time.parts),
        "parts_seconds": {part: float(seconds) for part, seconds in time.parts.items()},
    }


def _explanation(explanation: Explanation, searched: SearchResult, number: int) -> Mapping[str, Any]:
    seconds = float(searched.best[number - 1].time.seconds)
    return {
        "operations": [
            {"name": item.name, "part": item.part, "seconds_per_step": item.seconds, "times_per_step": item.times}
            for item in explanation.operations
        ],
        "links": [
            {
                "link": load.link,
                "rate_gb_per_s": load.rate / GB,
                "sent_gb_per_step": load.nbytes / GB,
                "busy_percent": 100 * load.busy(seconds),
            }
            for load in explanation.links
        ],
        "ten_percent_faster": [{"resource": gain.resource, "step_seconds": gain.seconds} for gain in explanation.gains],
        "one_change": [
            {
                "axis": neighbour.axis,
                "axes": None if neighbour.layout is None else dataclasses.asdict(neighbour.layout),
                "changed": list(neighbour.changed),
                "step_seconds": None if neighbour.layout is None else neighbour.seconds,
            }
            for neighbour in explanation.neighbours
        ],
    }


def _comparison(request: SearchRequest, comparison: Comparison) -> Mapping[str, Any]:
    if comparison.time is None:
        return {"problems": list(comparison.problems)}
    fullest = max(comparison.ranks, key=lambda rank: rank.peak)
    return {
        "problems": [],
        **_figures(request, comparison.time),
        "peak_memory_gib": float(used_memory(fullest.peak)) / GIB,
        "at_peak_gib": {kind: nbytes / GIB for kind, nbytes in fullest.at_peak.items()},
    }
