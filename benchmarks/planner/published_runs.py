"""Fits the time model's constants to published runs, and predicts each family of sources by a fit that has not seen it.

python -m benchmarks.planner.published_runs [--write]

calibration.csv holds the runs: shapes, layouts and measured throughput, with the source of each. --write replaces the
constants that the planner uses by those of the fit to all families. Prints, per source:

blind      errors of the fit without the source's family.
two rows   the same after one factor from two of the source's rows, over many draws of the two.
machine    the same after six factors of the machine (fit.MACHINE) from a tenth of the rows, at least two.

Each is beside the same errors of a model that knows nothing but an MFU, with the same knowledge: the median MFU of the
other families on the same device and precision (or of all of them, if there is none); of the two rows; of the tenth.
For aleph-alpha, whose runs try out many layouts, it also prints how well the layouts of a group are ordered, and
whether memory is predicted to suffice.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.planner.calibration.fit import Vector, constants_of, fit_all
from benchmarks.planner.calibration.prediction import RowRun, choose, machine_constants
from megatron.base.errors import ConfigError
from megatron.planner.time.constants import FITTED, MANY_NODES, Constants, priors
from megatron.planner.time.step_time import step_seconds

FILE = Path(__file__).with_name("calibration.csv")
# Prefix of a source -> its family.
FAMILIES = {
    "megatron-lm": "megatron-lm",
    "nemo": "nemo",
    "bridge": "bridge",
    "torchtitan": "torchtitan",
    "olmo": "olmo + llama3",
    "llama3": "olmo + llama3",
    "aleph": "aleph-alpha",
    "colossalai": "colossalai",
}
MEGATRON_LIKE = ("megatron-lm", "nemo", "bridge")
LARGE, EVERY = "aleph-alpha", 4  # the fit reads every fourth run of the family with most of them
FAMILY_WEIGHT = 30.0  # the most rows for which a family counts
DRAWS = 10


@dataclass(frozen=True)
class Runs:
    """The runs in order, and the measured seconds of a step of each."""

    chosen: Sequence[RowRun]
    measured: Vector

    @property
    def sources(self) -> np.ndarray:
        """Returns the source of each run."""
        return np.array([run.row["source"] for run in self.chosen])

    @property
    def families(self) -> np.ndarray:
        """Returns the family of each run."""
        return np.array([family_of(run.row["source"]) for run in self.chosen])

    @property
    def dense(self) -> np.ndarray:
        """Returns whether each run is dense, and of quality A or B."""
        return np.array([not run.row["experts"] and run.row["quality"] in "AB" for run in self.chosen])

    @property
    def experts(self) -> np.ndarray:
        """Returns whether each run has experts, and is of quality A or B."""
        return np.array([bool(run.row["experts"]) and run.row["quality"] in "AB" for run in self.chosen])

    @property
    def sharded_over_many_nodes(self) -> np.ndarray:
        """Returns whether each run shards parameters over more than `MANY_NODES` nodes."""
        return np.array(
            [
                run.row["dp_sharding"] == "fsdp"
                and int(run.row["gpus"]) > MANY_NODES * int(run.row["gpus_per_node"] or 1)
                for run in self.chosen
            ]
        )

    def mfu_seconds(self) -> Vector:
        """Returns the seconds of each run's step at the bf16 peak."""
        return np.array(
            [
                run.model.model_flops
                / (run.planned.settings.mesh.world_size * run.planned.cluster.device.flops("bf16"))
                for run in self.chosen
            ]
        )

    def seconds(self, places: Sequence[int] | np.ndarray, constants: Constants) -> Vector:
        """Returns [places, K] seconds of a step."""
        return step_seconds([self.chosen[place].model for place in places], constants)


def family_of(source: str) -> str:
    """Returns the name of the sources that are left out together."""
    return next(family for prefix, family in FAMILIES.items() if source.startswith(prefix))


def read_runs() -> tuple[Runs, dict[str, int]]:
    """Returns (runs with a throughput that can be planned, reason -> number of those that cannot)."""
    start = Constants()
    chosen, reasons = [], dict[str, int]()
    for row in read_table():
        if row["status"] == "ok":
            try:
                chosen.append(choose(row, start))
            except ConfigError as error:
                reasons[str(error)] = reasons.get(str(error), 0) + 1
    return Runs(chosen, np.array([run.measured for run in chosen])), reasons


def read_table() -> list[dict[str, str]]:
    """Returns all rows of the file."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def fit_without(runs: Runs, family: str | None) -> Vector:
    """Returns the logarithms of the constants, fitted to the dense runs of quality A and B of all other families."""
    families = runs.families
    use = runs.dense & (families != family)
    of_large = np.cumsum(families == LARGE)  # counted in the family, so that rows of others do not change the choice
    use &= (families != LARGE) | (of_large % EVERY == EVERY // 2)
    places = np.flatnonzero(use)
    weights = [min(1.0, FAMILY_WEIGHT / (families[places] == families[place]).sum()) for place in places]
    return fit_all(lambda constants: runs.seconds(places, constants), runs.measured[places], weights)


def errors(predicted: Vector, measured: Vector) -> Vector:
    """Returns the errors of throughput, in percent."""
    return 100 * np.abs(measured / predicted - 1)


def text(found: Sequence[float]) -> str:
    """Formats the median and the 90th percentile."""
    return f"{np.median(found):5.1f} / {np.percentile(found, 90):4.1f}" if len(found) else "      -     "


def after_rows(runs: Runs, places: np.ndarray, predicted: Vector, known: int, rng: np.random.Generator) -> list[float]:
    """Returns the errors of the other rows when one factor is set by `known` of them, over draws."""
    found: list[float] = []
    for _ in range(DRAWS):
        if len(places) <= known:
            break
        two = rng.choice(len(places), known, replace=False)
        others = np.setdiff1d(np.arange(len(places)), two)
        ratio = runs.measured[places] / predicted
        factor = np.exp(np.log(ratio[two]).mean())
        found += list(errors(predicted[others] * factor, runs.measured[places][others]))
    return found


def after_machine(
    runs: Runs, places: np.ndarray, blind: Vector, peak: Vector, rng: np.random.Generator
) -> tuple[list[float], list[float]]:
    """Returns the errors of the other rows with machine factors from a tenth of the rows, and with its median MFU."""
    found: list[float] = []
    plain: list[float] = []
    known = max(2, len(places) // 10)
    for _ in range(3):
        if len(places) <= known:
            break
        tenth = rng.choice(places, known, replace=False)
        others = np.setdiff1d(places, tenth)
        constants = machine_constants([runs.chosen[place] for place in tenth], constants_of(blind))
        found += list(errors(runs.seconds(others, constants)[:, 0], runs.measured[others]))
        mfu = np.median(peak[tenth] / runs.measured[tenth])
        plain += list(errors(peak[others] / mfu, runs.measured[others]))
    return found, plain


def constant_mfu(runs: Runs, places: np.ndarray, family: str, peak: Vector) -> Vector:
    """Returns the seconds of each run, at the median MFU of the other families on its architecture and precision."""
    device = np.array([run.planned.cluster.device.architecture for run in runs.chosen])
    precision = np.array([run.row["precision"] for run in runs.chosen])
    others = runs.dense & (runs.families != family)
    found = []
    for place in places:
        alike = others & (device == device[place]) & (precision == precision[place])
        alike = alike if alike.any() else others
        found.append(peak[place] / np.median((peak / runs.measured)[alike]))
    return np.array(found)


def tau(first: Vector, second: Vector) -> float:
    """Returns Kendall's rank correlation, without pairs that are equal in either."""
    sign = np.sign(first[:, None] - first) * np.sign(second[:, None] - second)
    return float(sign.sum() / max(1, np.count_nonzero(sign)))


def ranking(runs: Runs, places: np.ndarray, predicted: Vector) -> None:
    """Prints how the layouts of each group of aleph-alpha are ordered."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, place in enumerate(places):
        row = runs.chosen[place].row
        groups.setdefault((row["model"], row["seq"], row["gpus"]), []).append(number)
    measured = runs.measured[places]
    found, first = [], 0
    for members in groups.values():
        found.append(tau(predicted[members], measured[members]))
        best = int(np.argmin(measured[members]))
        first += best in np.argsort(predicted[members], kind="stable")[:5]
    shown = " ".join(f"{value:.2f}" for value in sorted(found))
    print(f"\nlayouts of aleph-alpha, left out: tau {shown}; median {np.median(found):.2f}")
    print(f"the true best is among the first five of {first} of {len(groups)} groups")


def memory() -> None:
    """Prints for how many runs of aleph-alpha `fits` is right."""
    right = total = small = 0
    known: dict[str, bool] = {}
    for row in read_table():
        if family_of(row["source"]) != LARGE or row["status"] == "not run":
            continue
        key = " ".join(row[name] for name in ("model", "seq", "gpus", "micro_batch", "tp", "pp", "sequence_parallel"))
        key += row["attention"][:7] + row["recompute"] + row["stack"]
        if key not in known:
            try:
                known[key] = choose(row, Constants()).fits
            except ConfigError:
                continue
        total += 1
        right += known[key] == (row["status"] == "ok")
        small += known[key] and row["status"] != "ok"
    print(f"fits is right for {right} of {total} runs ({right / total:.1%}); {small} are predicted to fit and do not")


def main(write: bool) -> None:
    """Fits, predicts and prints."""
    began = time.perf_counter()
    runs, reasons = read_runs()
    for reason, number in reasons.items():
        print(f"{number} runs are not planned: {reason}")
    families, sources, peak = runs.families, runs.sources, runs.mfu_seconds()
    everything = np.arange(len(runs.chosen))
    whole = fit_without(runs, None)
    inside = runs.seconds(everything, constants_of(whole))[:, 0]
    print(f"{len(runs.chosen)} runs, fitted to all families after {time.perf_counter() - began:.0f} s\n")
    print(
        "median / p90 error in %    blind       MFU         two rows    MFU         machine     MFU         in the fit"
    )
    rng = np.random.default_rng(0)
    blind = np.zeros(len(runs.chosen))
    pooled: dict[str, list[float]] = {"blind": [], "mfu": [], "machine": [], "machine mfu": []}
    for family in dict.fromkeys(FAMILIES.values()):
        of_family = np.flatnonzero(families == family)
        if not len(of_family):
            continue
        left_out = fit_without(runs, family)
        blind[of_family] = runs.seconds(of_family, constants_of(left_out))[:, 0]
        for source in dict.fromkeys(sources[of_family]):
            for kind, rows in (("", runs.dense), (" experts", runs.experts)):
                places = np.flatnonzero((sources == source) & rows)
                if not len(places):
                    continue
                plain = constant_mfu(runs, places, family, peak)
                machine, machine_plain = after_machine(runs, places, left_out, peak, rng)
                columns = [
                    errors(blind[places], runs.measured[places]),
                    errors(plain, runs.measured[places]),
                    after_rows(runs, places, blind[places], 2, rng),
                    after_rows(runs, places, plain, 2, rng),
                    machine,
                    machine_plain,
                    errors(inside[places], runs.measured[places]),
                ]
                print(f"{source + kind:22} {len(places):3}", *map(text, columns), flush=True)
                if not kind and family in MEGATRON_LIKE:
                    pooled["blind"] += list(columns[0])
                    pooled["mfu"] += list(columns[1])
                if not kind:
                    pooled["machine"] += machine
                    pooled["machine mfu"] += machine_plain
    print(f"\nMegatron-like, dense, blind {text(pooled['blind'])}, constant MFU {text(pooled['mfu'])}")
    print(f"all dense, machine factors {text(pooled['machine'])}, constant MFU {text(pooled['machine mfu'])}")
    ranked = np.flatnonzero(families == LARGE)
    ranking(runs, ranked, blind[ranked])
    memory()
    start, spread = priors()
    print("\nconstant               prior        fitted    departure in units of its uncertainty")
    for name, before, after, unit in zip(Constants.names(), start, whole, spread, strict=True):
        print(f"{name:22} {np.exp(before):10.4g} {np.exp(after):10.4g} {(after - before) / unit:+7.1f}")
    if write:
        values = {name: float(f"{np.exp(value):.4g}") for name, value in zip(Constants.names(), whole, strict=True)}
        kinds = {
            "dense": np.array(pooled["blind"]),
            "ZeRO-3 over many nodes": errors(blind, runs.measured)[runs.dense & runs.sharded_over_many_nodes],
            "experts": errors(blind, runs.measured)[runs.experts],
        }
        content = {
            "made_by": "python -m benchmarks.planner.published_runs --write",
            "blind_error_percent": {
                kind: [round(float(np.quantile(percents, part)), 1) for part in (0.5, 0.9)]
                for kind, percents in kinds.items()
            },
        }
        FITTED.write_text(json.dumps({**content, "constants": values}, indent=1) + "\n", encoding="utf-8")
        print(f"{FITTED} written")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the planner's constants")
    main(parser.parse_args().write)
