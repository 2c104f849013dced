"""Reads a cluster file (TOML), or the name of a built-in cluster. docs/planner.md explains the file."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.base.errors import ConfigError, shown
from megatron.config.interval import RANKS, Interval
from megatron.planner.time.hardware import BF16, FP8, GB, GIB, TERA, Cluster, Device, built_in, device_named

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same package under its earlier name
    import tomli as tomllib

# In the units of the file, which suit any machine: what is computed from such numbers is neither 0 nor infinite.
_AMOUNT = Interval("from 1e-6 to 1e9", lambda x: 1e-6 <= x <= 1e9)
# Key of the file -> the field that it sets, its unit, and its interval.
_CLUSTER = {
    "nodes": ("nodes", 1, RANKS),
    "devices_per_node": ("node", 1, RANKS),
    "network_gb_per_s": ("network", GB, _AMOUNT),
    "host_gb_per_s": ("host", GB, _AMOUNT),
    "host_memory_gib": ("host_memory", GIB, _AMOUNT),
    "host_memory_gb_per_s": ("host_rate", GB, _AMOUNT),
}
_DEVICE = {
    "memory_gib": ("memory", GIB, _AMOUNT),
    "bandwidth_gb_per_s": ("bandwidth", GB, _AMOUNT),
    "link_gb_per_s": ("link", GB, _AMOUNT),
    "processors": ("processors", 1, RANKS),
}
_RATES = {"bf16_tflops": ("peak", BF16), "fp8_tflops": ("peak", FP8)}
_BEST = {"bf16_matmul_tflops": ("reached", BF16), "fp8_matmul_tflops": ("reached", FP8)}


def read_cluster(text: str) -> Cluster:
    """Returns the cluster of a file, or of a built-in name such as h100:32x8. Raises ConfigError."""
    path = Path(text)
    if path.suffix != ".toml" and not path.is_file():
        return built_in(text)
    try:
        words = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--cluster {text}: {' '.join(str(error).split())}; write it as docs/planner.md shows"
        ) from None
    return _cluster(text, words)


def _cluster(file: str, words: Mapping[str, Any]) -> Cluster:
    names = {"device", *_CLUSTER}
    if unknown := sorted(set(words) - names):
        raise ConfigError(
            f"--cluster {file}: unknown {', '.join(map(shown, unknown))}; known are {', '.join(sorted(names))}"
        )
    if "device" not in words:
        raise ConfigError(f'--cluster {file} names no device; add a line such as device = "h100"')
    device = words["device"]
    if isinstance(device, str):
        like, changed = device, device_named(device)
    elif isinstance(device, dict):
        like, changed = _device(file, device)
    else:
        raise ConfigError(f"--cluster {file}: device is {shown(device)}; give a name, or a table [device]")
    usual = built_in(like)
    cluster = dataclasses.replace(usual, device=changed)
    values = {
        _CLUSTER[key][0]: _number(file, key, value, *_CLUSTER[key][1:])
        for key, value in words.items()
        if key in _CLUSTER
    }
    if "node" in values:  # a node of more devices has more and faster main memory, unless the file says otherwise
        for name in ("host_memory", "host_rate"):
            values.setdefault(name, getattr(usual, name) * values["node"] / usual.node)
    return dataclasses.replace(cluster, **values)  # type: ignore[arg-type]


def _device(file: str, words: Mapping[str, Any]) -> tuple[str, Device]:
    """(the built-in device that it resembles, the device). The numbers of the file replace those of the built-in
    device."""
    names = {"like", *_DEVICE, *_RATES, *_BEST}
    if unknown := sorted(set(words) - names):
        raise ConfigError(
            f"--cluster {file}: unknown {', '.join(map(shown, unknown))} in [device]; known are "
            f"{', '.join(sorted(names))}"
        )
    like = words.get("like")
    if not isinstance(like, str):
        raise ConfigError(
            f'--cluster {file}: device.like is {shown(like)}; name the most similar built-in device, such as "h100"'
        )
    device = device_named(like)
    values = {
        _DEVICE[key][0]: _number(file, key, value, *_DEVICE[key][1:]) for key, value in words.items() if key in _DEVICE
    }
    device = dataclasses.replace(device, name=f"{like} of {file}", **values)  # type: ignore[arg-type]
    peak, reached = dict(device.peak), dict(device.reached)
    for key, (_, kind) in _RATES.items():
        if key in words:
            rate = _number(file, key, words[key], TERA, _AMOUNT)
            # Large products reach the same part of the peak, unless the file says otherwise.
            reached[kind] = rate * (reached[kind] / peak[kind] if kind in peak else reached[BF16] / peak[BF16])
            peak[kind] = rate
    for key, (_, kind) in _BEST.items():
        if key in words:
            reached[kind] = _number(file, key, words[key], TERA, _AMOUNT)
            if kind not in peak or reached[kind] > peak[kind]:
                raise ConfigError(f"--cluster {file}: {key} {words[key]} is above the peak; correct one of them")
    return like, dataclasses.replace(device, peak=peak, reached=reached)


def _number(file: str, key: str, value: Any, unit: float, interval: Interval) -> float:
    whole = unit == 1
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not interval.holds(value):
        raise ConfigError(
            f"--cluster {file}: {key} is {shown(value)}; it must be a {'whole ' * whole}number {interval.words}"
        )
    return value if whole else float(value) * unit
