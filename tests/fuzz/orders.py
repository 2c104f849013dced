"""Random models, layouts and memory features under the adversarial runtime (tests/adversary): the same bits, and no
race.

By hand: `python -m tests.fuzz.orders --seed 1 --cases 100`. The cases are those of `layouts`, without adapters.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.base.errors import UserError
from tests import pool
from tests.adversary.runs import trained
from tests.adversary.runtime import LATE, SHUFFLED
from tests.fuzz import layout_cases
from tests.fuzz.campaign import Campaign, Failure, main, outcome


@dataclass(frozen=True)
class Case:
    """seed: of the shuffled order."""

    run: layout_cases.Case
    seed: int


def draw(rng: random.Random) -> Case:
    """See layout_cases.draw."""
    found = layout_cases.draw(rng)
    model = tuple(flag for flag in found.model if flag not in (layout_cases.LORA, layout_cases.ATTENTION))
    return Case(replace(found, model=model, then=None), rng.randrange(1000))


def simpler(case: Case) -> Iterable[Case]:
    """See layout_cases.simpler."""
    for run in layout_cases.simpler(case.run):
        yield replace(case, run=run)


def check_case(case: Case, folder: Path) -> str:
    """Losses, gradient norms, weights and optimizer state of a few steps, in the ordinary order and in two others."""
    world = case.run.world
    try:
        run, _, _ = layout_cases.runs_of(case.run, folder)
        expected = pool.run(world, trained, run, None)
    except (UserError, AssertionError) as error:
        if isinstance(error, UserError) or "UserError" in str(error) or "ConfigError" in str(error):
            return "refused"
        raise
    for mode in (LATE, SHUFFLED):
        if pool.run(world, trained, run, mode, case.seed) != expected:
            raise Failure(f"other numbers in the order {mode!r}")
    return "same bits"


def show(case: Case) -> None:
    """Run one case and print what came of it."""
    print(*outcome(CAMPAIGN, case))


CAMPAIGN = Campaign(
    "orders",
    draw,
    check_case,
    simpler,
    lambda case: f'python -c "from tests.fuzz.orders import *; show({case!r})"',
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(CAMPAIGN)
