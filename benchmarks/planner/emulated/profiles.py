"""Takes the planner's profile of each model on its hosts, at each rate of the links, under the quota of the runs."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster.quota import Quotas
from benchmarks.planner.emulated.grid import RANKS, RATES, SHARE, Model
from benchmarks.planner.emulated.ranks import Ranks
from megatron.planner.time.profile_file import MachineProfile, read_profile

LAYER_SECONDS, MESSAGE_SECONDS = 150.0, 75.0  # of measuring
LONGEST_SECONDS = 400.0
_SIZES = "--micro-batch-size 2 --train-iters 1 --micro-batch-sizes 2 4"
# Computation does not depend on the links: one profile of a model has all layers, the others those that cost least.
_ALL_LAYERS = "--tensor-parallel-sizes 1 2 --context-parallel-sizes 1 2"
_FEW_LAYERS = "--tensor-parallel-sizes 1 --context-parallel-sizes 1"


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
                    seconds, layers = MESSAGE_SECONDS, _FEW_LAYERS
                    if rate == RATES[-1]:
                        seconds, layers = LAYER_SECONDS, _ALL_LAYERS
                    words = f"--seconds {seconds:g} {_SIZES} {layers}".split()
                    flags = ["--out", str(path.resolve()), *words, *model.flags]
                    ranks.run("tools/profile_machine.py", flags, LONGEST_SECONDS, lambda line: None)
                    spent = time.monotonic() - started
                    print(f"profile of {model.name} at {rate:g} Mbit/s in {spent:.0f} s", flush=True)


def profile_of(folder: Path, model: Model, rate: float) -> MachineProfile:
    """Returns the profile of a model with links of this rate. Raises ConfigError."""
    whole = read_profile(str(_file(folder, model, RATES[-1])))
    return dataclasses.replace(whole, messages=read_profile(str(_file(folder, model, rate))).messages)


def _file(folder: Path, model: Model, rate: float) -> Path:
    return folder / f"profile_{model.name}_{rate:g}.json"
