"""Silent faults on one rank of a training run: what it computes or keeps must not drift away from its copies unseen.

A bit flips in a weight or in a state of the optimizer, a gradient turns to NaN or doubles before or after its
reduction, or one rank steps with another learning rate. Whatever happens, no rank waits for ever, all take the same
decisions, and two copies of a number that differ at a comparison are named, with a rank; the truth is taken from
digests of all pieces by their place in the global model, which know nothing of process groups. OUTCOMES is the table of
docs/data_parallel.md.

By hand: `python -m tests.fuzz.drift --seed 1 --cases 300`.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import ReplicaError
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.mesh import mesh_of
from megatron.config.run import RunConfig
from megatron.core.comm.collectives import Handle, gather_objects
from megatron.core.groups import View
from megatron.training.loop import Callback, fit
from megatron.training.replicas import CompareReplicas
from megatron.training.setup import build
from megatron.training.state import StepReport
from megatron.training.trainer import Trainer
from tests import pool
from tests.fuzz.campaign import Campaign, Failure, main
from tests.unit.config.runs import SHORT_RUN, make_run

STEPS, INTERVAL = 5, 2
TINY = {
    **SHORT_RUN,
    "num_layers": 2,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": STEPS,
    "eval_iters": 0,
}
EXPERTS = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_experts": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
ZERO = {"use_distributed_optimizer": True}
# layout -> (processes, fields)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (2, {}),
    "plain, dp 4": (4, {}),
    "plain, tp 2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "plain, pp 2": (4, {"pipeline_model_parallel_size": 2}),
    "plain, ep 2": (4, {**EXPERTS, "expert_model_parallel_size": 2}),
    "ZeRO-1": (2, ZERO),
    "ZeRO-1, 2 instances": (4, {**ZERO, "num_distributed_optimizer_instances": 2}),
    "ZeRO-1, tp 2": (4, {**ZERO, "tensor_model_parallel_size": 2}),
    "ZeRO-2": (2, {**ZERO, "data_parallel_sharding_strategy": "optim_grads"}),
    "ZeRO-3": (2, {**ZERO, "data_parallel_sharding_strategy": "optim_grads_params"}),
    "ZeRO-3, ep 2": (4, {**ZERO, **EXPERTS, "expert_model_parallel_size": 2}),
}
LAYOUTS["ZeRO-3, ep 2"][1]["data_parallel_sharding_strategy"] = "optim_grads_params"
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": True}}
FAULTS = ("weight", "state", "nan before", "double before", "nan after", "double after", "rate")
# What follows from a fault: the copies are named; they are overwritten by their owner's, or from masters; they never
# differ, because every rank takes the number from one place; or all ranks leave the step out.
NAMED, REPAIRED, EQUAL, SKIPPED = "named", "repaired", "equal", "skipped"
_PLAIN = {
    "weight": {NAMED, REPAIRED},  # repaired where the weights of a bf16 model are rounded from their masters again
    "state": {NAMED, REPAIRED},  # repaired where a difference in the last bit is rounded away
    "nan before": {SKIPPED},
    "double before": {EQUAL},
    "nan after": {SKIPPED},
    "double after": {NAMED},
    "rate": {NAMED},
}
_SHARDED = _PLAIN | {
    "weight": {NAMED, REPAIRED, EQUAL},  # equal: of a slice that its owner gives to all others
    "state": {EQUAL},
    "double after": {EQUAL},
    "rate": {EQUAL},
}
# Ranks of tp copy what is not sharded, and instances of the optimizer copy each other.
_PARTLY_SHARDED = {name: _PLAIN[name] | _SHARDED[name] for name in FAULTS} | {"double before": {EQUAL, NAMED}}
OUTCOMES = {
    layout: _PARTLY_SHARDED
    if layout in ("ZeRO-1, 2 instances", "ZeRO-1, tp 2")
    else _SHARDED
    if "ZeRO" in layout
    else _PLAIN
    for layout in LAYOUTS
}


@dataclass(frozen=True)
class Case:
    """A fault in step `step`, or behind it, on rank `rank`; `seed` chooses the tensor, the element and the bit."""

    layout: str
    precision: str
    fault: str
    step: int
    rank: int
    seed: int


def draw(rng: random.Random) -> Case:
    """Any fault under any layout."""
    layout = rng.choice(list(LAYOUTS))
    rank = rng.randrange(LAYOUTS[layout][0])
    precision = rng.choice(list(PRECISIONS))
    return Case(layout, precision, rng.choice(FAULTS), rng.randint(1, STEPS - 2), rank, rng.randrange(1 << 30))


def check_case(case: Case, folder: Path) -> str:
    """Returns the outcome, which must be one of OUTCOMES; see `Seen` for what is asked of every rank."""
    world, fields = LAYOUTS[case.layout]
    run = make_run(**TINY | fields | PRECISIONS[case.precision])
    ranks: list[Seen] = pool.run(world, run_with_fault, run, case)
    first = ranks[0]
    if any(
        (seen.message, seen.skipped, seen.iteration) != (first.message, first.skipped, first.iteration)
        for seen in ranks
    ):
        raise Failure(f"ranks do not agree: {ranks}")
    differed = [step for step, names in sorted(first.differing.items()) if names]
    compared = [step for step in differed if step % INTERVAL == 0]
    if (first.message is None) != (not compared):
        raise Failure(
            f"copies differed after steps {differed}, compared every {INTERVAL}, and was said: {first.message}"
        )
    if first.message is not None:
        named = set(re.findall(r"(?:decoder|embedding|output_layer)[\w.]*", first.message))
        numbers = {int(n) for part in re.findall(r"ranks? ([\d, ]+)", first.message) for n in re.findall(r"\d+", part)}
        if not named <= first.differing[compared[0]] or not named or case.rank not in numbers:
            raise Failure(f"{first.differing[compared[0]]} differ, and was said: {first.message}")
    outcome = (
        NAMED if first.message else SKIPPED if first.skipped else REPAIRED if differed or first.was_different else EQUAL
    )
    if outcome not in OUTCOMES[case.layout][case.fault]:
        raise Failure(f"{outcome}, expected one of {OUTCOMES[case.layout][case.fault]}: {first}")
    return outcome


@dataclass
class Seen:
    """What a rank has seen: names of parameters with differing copies after each step, and right behind a flipped
    bit."""

    differing: dict[int, set[str]]
    was_different: bool = False
    message: str | None = None
    skipped: int = 0
    iteration: int = 0


def run_with_fault(rank: int, size: int, run: RunConfig, case: Case) -> Seen:
    """Trains with the fault, until the comparison stops it or to the end."""
    mesh, instances = mesh_of(run.parallel, size), data_parallel_settings(run.parallel).optimizer_instances
    trainer = build(
        run, pool.groups(tp=mesh.tp, pp=mesh.pp, ep=mesh.ep, etp=mesh.etp, instances=instances), torch.device("cpu")
    )
    seen = Seen({})
    fault = Fault(case, seen)
    if case.rank == rank:
        fault.prepare(trainer)
    try:
        fit(trainer, [Truth(seen), CompareReplicas(INTERVAL), fault])
    except ReplicaError as error:
        seen.message = str(error)
    seen.skipped, seen.iteration = trainer.state.nan_iterations, trainer.state.iteration
    return seen


class Truth(Callback):
    """Finds out after every step which copies differ."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        """Compares all pieces of all ranks."""
        self._seen.differing[report.iteration] = differing(trainer)


def differing(trainer: Trainer) -> set[str]:
    """Returns the names of parameters of which two ranks hold pieces of the same place with other bits."""
    trainer.data_parallel.synchronize()
    digests: dict[tuple[Any, ...], str] = {}

    def note(name: str, kind: str, offset: Any, start: int, values: Tensor) -> None:
        data = values.detach().contiguous().view(torch.uint8).numpy().tobytes()
        digests[name, kind, offset, start, len(data)] = hashlib.sha256(data).hexdigest()

    for name, parameter in trainer.parameters.items():
        if parameter.numel():
            for section in parameter.info.sections:
                note(name, "weight", section.offset, 0, section.of(parameter.detach()))
    for piece, kind, values in trainer.optimizer.pieces():
        section = trainer.parameters[piece.name].info.section_at(piece.start)
        note(piece.name, kind, section.offset, piece.start - section.start, values)
    everywhere = gather_objects(digests, trainer.groups.world)
    known: dict[tuple[Any, ...], str] = {}
    return {key[0] for rank in everywhere for key, digest in rank.items() if known.setdefault(key, digest) != digest}


class Fault(Callback):
    """The fault of a case. Only its rank is prepared; all ranks look at what has become of a flipped bit."""

    def __init__(self, case: Case, seen: Seen) -> None:
        self._case, self._seen = case, seen
        self._rng = random.Random(case.seed)
        self._flip: Callable[[], None] = lambda: None

    def prepare(self, trainer: Trainer) -> None:
        """Puts the fault into the step, or chooses the bit that flips behind it."""
        kind, step, data_parallel = self._case.fault, trainer.step, trainer.data_parallel

        def now() -> bool:
            return trainer.state.iteration + 1 == self._case.step

        bucket = self._rng.choice(data_parallel.buckets)
        name = self._rng.choice(list(bucket.parameters))
        start, stop = bucket.layout.offsets[name], bucket.layout.offsets[name] + bucket.layout.numels[name]
        factor = torch.nan if kind.startswith("nan") else 2.0
        if kind in ("weight", "state"):
            self._flip = functools.partial(self._flip_bit, trainer)
        elif kind == "rate":
            update = step.update
            step.update = lambda lr, *more: update(lr * 3 if now() else lr, *more)  # type: ignore[method-assign]
        elif kind.endswith("after"):
            plain = step.update

            def damaged(*arguments: Any) -> Any:
                if now():
                    piece = self._rng.choice([piece for b in data_parallel.buckets for piece in b.pieces])
                    owner = next(b for b in data_parallel.buckets if piece in b.pieces)
                    owner.grad_shard[piece.at : piece.at + piece.stop - piece.start] *= factor
                return plain(*arguments)

            step.update = damaged  # type: ignore[method-assign]
        else:
            reduce = data_parallel._comm.reduce

            def reduce_damaged(view: View, full: Tensor, label: str, then: Callable[[], None] | None = None) -> Handle:
                if now() and label == bucket.label:
                    full[start:stop] *= factor
                return reduce(view, full, label, then)

            data_parallel._comm.reduce = reduce_damaged  # type: ignore[method-assign]

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        """Flips the bit behind its step."""
        if report.iteration == self._case.step:
            trainer.data_parallel.synchronize()
            self._flip()
            self._seen.was_different = bool(differing(trainer))

    def _flip_bit(self, trainer: Trainer) -> None:
        if self._case.fault == "state":
            tensors = [values for _, _, values in trainer.optimizer.stored()]
        elif trainer.data_parallel.sharded_names:
            tensors = [values for _, values in trainer.data_parallel.weights()]
        else:
            tensors = [parameter.detach() for parameter in trainer.parameters.values()]
        flat = self._rng.choice(tensors).view(-1)
        bits = flat.view({2: torch.int16, 4: torch.int32}[flat.itemsize])
        # Not the highest bits of the exponent, with which a weight may end as NaN: that is another fault.
        bits[self._rng.randrange(len(bits))] ^= 1 << self._rng.randrange(4 * flat.itemsize)


def simpler(case: Case) -> Iterable[Case]:
    """Nothing: a case is one fault."""
    return ()


def show(case: Case) -> None:
    """Runs a case and prints its outcome."""
    print(check_case(case, Path(".")))


CAMPAIGN = Campaign(
    "drift", draw, check_case, simpler, lambda case: f'python -c "from tests.fuzz.drift import *; show({case!r})"'
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(CAMPAIGN)
