"""Random models under random layouts and memory features: each must train as one plain process does, and its checkpoint
must continue the same under another random layout. What the rules refuse by name is counted, not run.

By hand: `python -m tests.fuzz.layouts --seed 1 --cases 300`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from megatron.base.errors import UserError
from megatron.config.context_parallel import inner_size
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.mesh import mesh_of
from megatron.config.run import RunConfig
from megatron.tooling.layout_parity import Measurement, RankMeasurement, assemble, compare, first_gradients, trained
from megatron.training.checkpoint import save_checkpoint
from megatron.training.routing_trace import ExpertChoices
from megatron.training.setup import build
from tests import pool
from tests.fuzz.campaign import Campaign, Failure, main, outcome
from tests.fuzz.layout_cases import ATTENTION, BF16, LORA, SAVED_AT, STEPS, Case, configured, draw, runs_of, simpler

LIMIT = 1e-5  # relative, for the order of sums in fp32
# Margin of a choice of experts, of the spread of the scores, or of what an expert at its capacity keeps, of a weight:
# below it the order of sums decides, and both runs are right.
TIE = 1e-5
CPU = torch.device("cpu")


def check_case(case: Case, folder: Path) -> str:
    """fp32: the losses and first gradients of one plain process, and the choices, biases and balance losses of experts.
    Only the first gradient norm: later ones follow what Adam made of rounding in gradients of almost zero.
    bf16, where the order of sums shows: the very losses of the same layout without the features. Then the same for the
    steps after the checkpoint."""
    bf16 = BF16 in case.features
    try:
        run, plain, second = runs_of(case, folder)
    except UserError:
        return "refused"
    if LORA in case.model:
        flags = (*(flag for flag in case.model if flag not in (LORA, ATTENTION)), *((BF16,) if bf16 else ()))
        save = (("--save", str(folder / "base")), ("--save-interval", "1000"))
        pool.run(1, write_base, configured((*flags, *save), 1))
    expected = assemble(pool.run(case.world if bf16 else 1, all_steps, plain))
    try:
        found = assemble(pool.run(case.world, first_steps, run))
        later = assemble(pool.run(case.then[0], last_steps, second)) if second and case.then else None
    except AssertionError as error:
        if "UserError" in str(error) or "ConfigError" in str(error):
            return "refused when built"
        raise
    difference = compare(until_saved(expected), found)
    if bf16:
        if found.losses != expected.losses[:SAVED_AT] or difference.choice or not difference.same_biases:
            raise Failure(f"losses {found.losses}, without the features {expected.losses[:SAVED_AT]}; {difference}")
        return "same bits"
    if later is not None:
        difference = compare(expected, joined(found, later))
    if is_tie := difference.choice is not None and difference.choice[-1] <= TIE:
        # Rounding decided, and the numbers behind it differ in two right runs: compare those of the same choices.
        tables = (expected.choices, expected.capacity_margins)
        forced = [{key: value.numpy() for key, value in table.items()} for table in tables]
        whole = assemble(pool.run(case.world, following_steps, run, *forced))
        difference = compare(expected, whole)
    numbers = (difference.loss, difference.gradient, difference.norm, difference.balance)
    if difference.choice or not difference.same_biases or not all(each <= LIMIT for each in numbers):
        raise Failure(f"{difference}; losses {found.losses}, then {later and later.losses}; expected {expected.losses}")
    if is_tie:
        return "same with the choices of one process"
    return "same, and after a checkpoint" if later else "same"


def until_saved(whole: Measurement) -> Measurement:
    """The steps before the checkpoint."""
    lists = {name: getattr(whole, name)[:SAVED_AT] for name in ("losses", "balance")}
    tables = {
        name: {key: value for key, value in getattr(whole, name).items() if key[0] < SAVED_AT}
        for name in ("biases", "choices", "margins", "capacity_margins")
    }
    return dataclasses.replace(whole, **lists, **tables)


def joined(first: Measurement, later: Measurement) -> Measurement:
    """A run and its continuation as one."""
    return dataclasses.replace(
        first,
        losses=first.losses + later.losses,
        balance=first.balance + later.balance,
        biases=first.biases | later.biases,
        choices=first.choices | later.choices,
        margins=first.margins | later.margins,
        capacity_margins=first.capacity_margins | later.capacity_margins,
    )


def write_base(rank: int, size: int, run: RunConfig) -> None:
    """A checkpoint of initial weights, for adapters."""
    save_checkpoint(build(run, _groups(run, size), CPU))


def first_steps(rank: int, size: int, run: RunConfig) -> RankMeasurement:
    """What this rank measures up to the step after which the checkpoint is written."""
    return _steps(size, run, SAVED_AT, save=True)


def all_steps(rank: int, size: int, run: RunConfig) -> RankMeasurement:
    """The same for the whole run."""
    return _steps(size, run, STEPS, save=False)


def following_steps(rank: int, size: int, run: RunConfig, *forced: dict[tuple[int, str, int], Any]) -> RankMeasurement:
    """Measures the whole run with the choices of another one: see RoutingTrace. The values are arrays."""
    tables = [{key: torch.as_tensor(value) for key, value in table.items()} for table in forced]
    return _steps(size, run, STEPS, *tables, save=False)


def last_steps(rank: int, size: int, run: RunConfig) -> RankMeasurement:
    """The same, but for gradients, after the checkpoint."""
    trainer = build(run, _groups(run, size), CPU)
    assert trainer.state.iteration == SAVED_AT
    return trained(trainer, STEPS - SAVED_AT).as_arrays()


def _steps(size: int, run: RunConfig, steps: int, *forced: ExpertChoices, save: bool) -> RankMeasurement:
    trainer = build(run, _groups(run, size), CPU)
    with first_gradients(trainer) as pieces:
        found = trained(trainer, steps, *forced)
    if save:
        save_checkpoint(trainer)
    pieces = [(name, where, piece.float()) for name, where, piece in pieces]
    return dataclasses.replace(found, norms=found.norms[:1], pieces=pieces).as_arrays()


def _groups(run: RunConfig, size: int) -> Any:
    mesh, instances = mesh_of(run.parallel, size), data_parallel_settings(run.parallel).optimizer_instances
    inner = inner_size(run.parallel)
    return pool.groups(tp=mesh.tp, cp=mesh.cp, pp=mesh.pp, ep=mesh.ep, etp=mesh.etp, instances=instances, inner=inner)


def show(case: Case) -> None:
    """Run one case and print what came of it."""
    print(*outcome(CAMPAIGN, case))


CAMPAIGN = Campaign(
    "layouts",
    draw,
    check_case,
    simpler,
    lambda case: f"python -c 'from tests.fuzz.layouts import *; show({case!r})'".replace("'--", '"--').replace(
        "',", '",'
    ),
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(CAMPAIGN)
