"""Part I: which kernels a step consists of, how long the GPU idles between them, and which calls make the host wait."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.case import Case, Result, Setting, check
from benchmarks.gpu.part_g_speed import EXPERTS, SLICE_8B, needs
from benchmarks.gpu.runs import TOY_EXPERTS, TOY_FP8, fp8_flags, run_seconds, start, trainer_of

TOP = 40
WARM = 3
STEPS = WARM + 4  # the profiler's own work takes as long as some steps
WAITS = ("Synchronize", "cudaMemcpy", "cudaStreamWait", "cudaEventQuery", "aten::item", "aten::_local_scalar_dense")
GAPS_US = (1, 10, 100, 1000)


class Span(NamedTuple):
    """A kernel, or a call of the host: its name, and its start and end in us."""

    name: str
    start: float
    end: float


def cases(setting: Setting) -> list[Case]:
    """Returns the cases of this part."""
    of = functools.partial
    real = f"{SLICE_8B} --global-batch-size 2"
    flags = f"{TOY_FP8} --bf16" if setting.toy else real
    ways = {
        "baseline": "",
        "fp8 blockwise": fp8_flags("blockwise"),
        "fp8 tensorwise": fp8_flags("tensorwise"),
        "cuDNN": "--attention-backend fused",
    }
    cases = [
        Case(f"8B slice, {name}", of(measure, setting, name, f"{flags} {more}"), run_seconds(f"{real} {more}", STEPS))
        for name, more in ways.items()
    ]
    experts = f"{TOY_EXPERTS} --bf16" if setting.toy else EXPERTS
    return [*cases, Case("experts", of(measure, setting, "experts", experts), run_seconds(EXPERTS, STEPS))]


def measure(setting: Setting, name: str, flags: str) -> Result:
    """Profiles one step, and writes its figures to a file in the folder of the results."""
    needs(setting, flags)
    trainer = trainer_of(flags, setting, start(setting))
    for _ in range(WARM):
        trainer.train_step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.cuda else [])]
    with profile(activities=activities) as profiler:
        report = trainer.train_step()
    device, host = spans(profiler.events() or [], cuda=setting.cuda)
    check(bool(device), "the profiler saw no kernel")
    values = {"seconds": report.seconds, **summary(device), "host_calls": calls(host)}
    path = setting.out / f"profile_{name.replace(' ', '_')}.json"
    path.write_text(json.dumps({"case": name, "flags": flags, **values}, indent=1), encoding="utf-8")
    slowest = ", ".join(f"{each['name'][:40]} {each['ms']:.3g} ms" for each in values["top"][:3])
    return Result(
        f"{values['kernels']} {'kernels' if setting.cuda else 'operations'}, busy {values['busy_ms']:.4g} ms, idle "
        f"{values['idle_ms']:.4g} ms of {1e3 * report.seconds:.4g}; {slowest}; {path.name}",
        {key: value for key, value in values.items() if key != "top"},
    )


def spans(events: Iterable[Any], *, cuda: bool) -> tuple[list[Span], list[Span]]:
    """Returns (kernels and copies of the GPU, calls of the host). Without a GPU the first are torch's own
    operations."""
    device, host = [], []
    for event in events:
        span = Span(event.name, event.time_range.start, event.time_range.end)
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        (device if on_gpu else host).append(span)
    if not cuda:
        device = [span for span in host if span.name.startswith("aten::")]
    return device, host


def summary(device: Sequence[Span]) -> dict[str, Any]:
    """Returns the kernels with the most time, copies, and the time and lengths of gaps in which no kernel ran."""
    time_of: dict[str, float] = defaultdict(float)
    count_of: dict[str, int] = defaultdict(int)
    for span in device:
        time_of[span.name] += span.end - span.start
        count_of[span.name] += 1
    order = sorted(time_of, key=lambda name: -time_of[name])
    rows = [{"name": name, "ms": time_of[name] / 1e3, "count": count_of[name]} for name in order]
    busy, gaps = gaps_of(device)
    return {
        "kernels": len(device),
        "busy_ms": busy / 1e3,
        "idle_ms": sum(gaps) / 1e3,
        "gaps": {f"over {us} us": sum(gap > us for gap in gaps) for us in GAPS_US},
        "copies": [row for row in rows if row["name"].startswith(("Memcpy", "Memset"))],
        "top": rows[:TOP],
    }


def gaps_of(device: Sequence[Span]) -> tuple[float, list[float]]:
    """Returns (us in which at least one span ran, the us of every gap between them)."""
    busy, gaps = 0.0, []
    reached: float | None = None
    for span in sorted(device, key=lambda span: span.start):
        if reached is not None and span.start > reached:
            gaps.append(span.start - reached)
        busy += max(0.0, span.end - (span.start if reached is None else max(reached, span.start)))
        reached = span.end if reached is None else max(reached, span.end)
    return busy, gaps


def calls(host: Sequence[Span]) -> list[dict[str, Any]]:
    """Returns the calls that copy or wait, with their time and number."""
    found: dict[str, list[float]] = defaultdict(list)
    for span in host:
        if any(word in span.name for word in WAITS):
            found[span.name].append((span.end - span.start) / 1e3)
    rows = [{"name": name, "ms": sum(times), "count": len(times)} for name, times in found.items()]
    return sorted(rows, key=lambda row: -row["ms"])
