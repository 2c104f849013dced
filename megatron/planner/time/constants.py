"""The constants of the time model: what no data sheet says.

Each has a prior value with an uncertainty, from which the fit on published runs (benchmarks/planner) departs where the
runs ask for it. docs/planner_model.md has their sources and the fitted values, which are in constants.json. Only the
fit reads those of other frameworks: attention_hopper, attention_first, attention_torch, unfused, host_unfused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A number, or K numbers at once: all formulas take both.
Number = float | NDArray[np.float64]
FITTED = Path(__file__).with_name("constants.json")


def constant(prior: float, spread: float, text: str) -> Any:
    """Returns a field: its value before the fit, the standard deviation of its logarithm, and a description."""
    return dataclasses.field(default=prior, metadata={"spread": spread, "text": text})


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Efficiencies and times; all are above 0."""

    gemm: Number = constant(1.0, 0.1, "large bf16 products, in units of the best measured rate")
    gemm_fp8: Number = constant(1.0, 0.15, "large fp8 products, in units of the best measured rate")
    gemm_blackwell: Number = constant(0.85, 0.15, "a factor on both on Blackwell")
    edge: Number = constant(100.0, 0.7, "loss of a product, in units of its time: edge x balance / min(M, N)")
    depth: Number = constant(60.0, 0.5, "and depth / K")
    wave: Number = constant(0.7, 0.3, "and wave x the idle part of the last wave of tiles; at most 1")
    attention_ampere: Number = constant(0.75, 0.15, "attention in units of the best bf16 product, on Ampere")
    attention_hopper: Number = constant(0.5, 0.2, "the same on Hopper")
    attention_third: Number = constant(0.75, 0.2, "the same of FlashAttention 3 on Hopper")
    attention_blackwell: Number = constant(0.6, 0.2, "the same on Blackwell")
    attention_first: Number = constant(0.6, 0.2, "FlashAttention 1 in units of the above")
    attention_torch: Number = constant(0.8, 0.2, "torch's scaled_dot_product_attention in units of the above")
    short: Number = constant(300.0, 0.5, "attention over s tokens runs at s / (s + short)")
    score: Number = constant(
        9.0, 0.3, "bytes per score that a fused softmax moves, forward; backward 1.4 times as many"
    )
    bandwidth: Number = constant(0.8, 0.1, "traffic of memory-bound kernels in units of the memory bandwidth")
    unfused: Number = constant(1.0, 0.3, "traffic of kernels of plain torch, in units of the count of operations")
    cast: Number = constant(1.0, 0.4, "traffic of the casts to fp8, in units of the count")
    link: Number = constant(0.78, 0.15, "collectives in a node, in units of the link")
    link_latency: Number = constant(20e-6, 0.5, "seconds of a collective in a node")
    network: Number = constant(0.75, 0.2, "collectives between nodes, in units of the network")
    network_latency: Number = constant(40e-6, 0.5, "seconds of a collective between nodes")
    interference: Number = constant(0.3, 0.4, "part of the overlapped communication that slows the computation")
    host: Number = constant(0.3e-3, 0.4, "seconds that the host needs to queue a layer's forward of fused kernels")
    host_experts: Number = constant(3e-3, 0.4, "the same of a layer with experts, whose rows the host waits for")
    host_unfused: Number = constant(1.0e-3, 0.4, "the same of plain torch")
    step: Number = constant(5e-3, 0.7, "seconds of a step that belong to no microbatch")
    straggler: Number = constant(0.005, 0.5, "part of the step that each doubling of the nodes adds")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the names of all constants, in order."""
        return tuple(spec.name for spec in dataclasses.fields(cls))

    @classmethod
    def of(cls, values: Mapping[str, Number]) -> Constants:
        """Returns constants with these values, and the priors of the others."""
        return cls(**values)


def priors() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the logarithm of each constant before the fit, and its standard deviation."""
    specs = dataclasses.fields(Constants)
    defaults = np.array([getattr(Constants(), spec.name) for spec in specs])
    return np.log(defaults), np.array([spec.metadata["spread"] for spec in specs])


@cache
def fitted() -> Constants:
    """Returns the constants that are shipped, fitted on all published runs."""
    return Constants.of(_file()["constants"])


MANY_NODES = 16  # up to so many, runs with ZeRO-3 are predicted as well as others


@dataclass(frozen=True)
class BlindErrors:
    """Errors of throughput on runs of families that the fit has not seen, in units of it: the median, and the 90th
    percentile."""

    median: float
    p90: float


@cache
def blind_errors() -> Mapping[str, BlindErrors]:
    """Returns the errors on kinds of published runs.

    "dense": dense runs of Megatron-LM, NeMo and Bridge. "ZeRO-3 over many nodes": dense runs whose parameters are
    sharded over more than `MANY_NODES` nodes. "experts": runs with experts.
    """
    percents = _file()["blind_error_percent"]
    return {kind: BlindErrors(0.01 * median, 0.01 * p90) for kind, (median, p90) in percents.items()}


def blind_error() -> float:
    """Returns the median error, in percent, on dense runs of Megatron-LM, NeMo and Bridge whose family was left out."""
    return round(100 * blind_errors()["dense"].median, 1)


def _file() -> Any:
    return json.loads(FITTED.read_text(encoding="utf-8"))
