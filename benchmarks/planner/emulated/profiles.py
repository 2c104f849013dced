"""Takes the planner's profile of each model on its hosts, at each rate of the links, under the quota of the runs."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.cluster.quota import Quotas
from benchmarks.planner.emulated.grid import RANKS, RATES, SHARE, Model
from benchmarks.planner.emulated.ranks import Ranks
from megatron.planner.time.profile_file import EndRow, LayerRow, MachineProfile, read_profile

SECONDS = 105.0  # of measuring, for each profile
LONGEST_SECONDS = 400.0
Row = TypeVar("Row", LayerRow, EndRow)
_SIZES = "--micro-batch-sizes 2 4 --tensor-parallel-sizes 1 2 --context-parallel-sizes 1 2"


def take_profiles(models: Sequence[Model], folder: Path) -> None:
    """Writes all profiles. Raises RunError if one fails."""
    with Quotas(RANKS, SHARE) as quotas, tempfile.TemporaryDirectory() as logs:
        quotas.limit(on=True)
        for model in models:
            with Ranks(model.hosts, RATES[0], quotas, Path(logs)) as ranks:
                for rate in RATES:
                    started = time.monotonic()
                    ranks.cluster.set_rate(rate)
                    path = _file(folder, model, rate)
                    words = f"--seconds {SECONDS:g} --micro-batch-size 2 --train-iters 1 {_SIZES}".split()
                    flags = ["--out", str(path.resolve()), *words, *model.flags]
                    ranks.run("tools/profile_machine.py", flags, LONGEST_SECONDS)
                    spent = time.monotonic() - started
                    print(f"profile of {model.name} at {rate:g} Mbit/s in {spent:.0f} s", flush=True)


def profile_of(folder: Path, model: Model, rate: float) -> MachineProfile:
    """Returns the profile of a model with links of this rate. Raises ConfigError.

    Computation does not depend on the links, so its times are the medians of all profiles of the model: each of them is
    taken in three minutes on processors whose own speed varies.
    """
    profiles = [read_profile(str(_file(folder, model, each))) for each in RATES]
    own = profiles[RATES.index(rate)]
    return dataclasses.replace(
        own,
        layers=medians([profile.layers for profile in profiles]),
        ends=medians([profile.ends for profile in profiles]),
    )


def medians(tables: Sequence[Sequence[Row]]) -> tuple[Row, ...]:
    """Returns the rows of the first table, each with the medians of the times of those that describe the same."""
    return tuple(_median([other for table in tables for other in table if _same(other, row)]) for row in tables[0])


def _median(rows: Sequence[Row]) -> Row:
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(rows[0]):
        values = [getattr(row, field.name) for row in rows]
        if isinstance(values[0], float):
            changed[field.name] = statistics.median(values)
        elif isinstance(values[0], dict):
            changed[field.name] = {name: statistics.median(each[name] for each in values) for name in values[0]}
    return dataclasses.replace(rows[0], **changed)


def _same(one: LayerRow | EndRow, other: LayerRow | EndRow) -> bool:
    """Whether they describe the same, apart from times."""
    fields = [field.name for field in dataclasses.fields(one) if isinstance(getattr(one, field.name), (int, str))]
    return all(getattr(one, name) == getattr(other, name) for name in fields)


def _file(folder: Path, model: Model, rate: float) -> Path:
    return folder / f"profile_{model.name}_{rate:g}.json"
