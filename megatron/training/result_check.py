"""Examines the numbers of a step before its update, and finds out whose fault a suspicious one is.

[Note: a suspicious step]
The update of a step is queued when its local results are known to be usual. A suspicious step is computed again, with
the same microbatches and the same random state:
    on the same ranks               other numbers, and a third time those of the second: a transient fault of the ranks
                                    whose numbers differ; the run goes on with the second. Other numbers each time: the
                                    rank is at fault, and the run ends with exit code 17
    on the ranks of another replica other numbers: the machine is at fault, the run ends with 17. The same: the data or
                                    the algorithm
    after a restart                 where there is no other replica and a number is not finite, the run saves and ends
                                    with 16. Its next start computes the step first, on another machine
Of suspicious steps in a row only the first is computed again: a run that diverges goes on at its usual speed.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NoReturn

import torch
from torch import Tensor

from megatron.base.errors import RESUME_EXIT_CODE, VALIDATION_EXIT_CODE, ResultError
from megatron.base.log import get_logger
from megatron.config.train import CORRECT, DETERMINISM, DISABLED, PERSISTENT, TRANSIENT
from megatron.core.comm.collectives import gather_objects
from megatron.core.streams.host_copy import HostCopy
from megatron.kernels.ops.square_sum import SquareSum
from megatron.training.batch import Batch
from megatron.training.local_results import LOCAL_NORM, LOSS, REDUCED_NORM, RESULTS, LocalResults, largest_of
from megatron.training.other_replica import ReplicaInput, input_of_replica, rank_at, replica_distance
from megatron.training.result_rule import ResultRule, Suspect
from megatron.training.result_state import UnresolvedStep
from megatron.training.state import TrainState
from megatron.training.step import Objective
from megatron.training.trained_model import TrainedModel

log = get_logger(__name__)

ResultTable = list[list[float]]  # the local results of all ranks
_OWN = (LOSS, LOCAL_NORM)  # results that a rank computes without others'
_NAMED = 8  # ranks in a message


@dataclass(frozen=True)
class ExaminedStep:
    """A step whose gradients are computed and not applied. iteration: its number from 1. samples: those of the run
    that it reads, in words."""

    iteration: int
    batches: Sequence[Batch]
    samples: str


class ResultCheck:
    """Examines every step of a run.

    waits: for the numbers of a step before its update; otherwise they are read late, and only reported. saves: the
    state before the examined step shall be saved although the run ends with an error.
    """

    def __init__(self, trained: TrainedModel, squares: SquareSum) -> None:
        """squares: the kernel of the norms."""
        run, self._trained, self._state = trained.run, trained, trained.results
        dynamic = trained.optimizer.loss_scale.dynamic  # then gradients that are not finite lower the scale
        finite = run.optimizer.check_for_nan_in_loss_and_grad
        large = run.train.check_for_large_grads
        self._rule = ResultRule(
            self._state,
            checked=(run.train.check_for_spiky_loss, large, large),
            finite=(finite, finite and not dynamic, finite and not dynamic),
            exact=trained.device.type == "cpu" or run.train.deterministic_mode,
        )
        self._results = LocalResults(trained.data_parallel, trained.groups.world, squares)
        self._mode = run.train.result_mode
        self.waits = self._mode != DISABLED
        self.saves = False
        self._random: dict[str, Tensor] = {}  # at the beginning of the step
        self._histories: dict[str, Tensor] = {}  # of FP8 scales, then
        self._reproduced_at = -1  # the last suspicious iteration whose numbers were reproduced, or follow such ones
        self._all_places: list[str] = []  # of all ranks
        self._differences: list[list[float]] = []  # between two computations of each step since the last line

    def begin_step(self) -> None:
        """Call before the first forward and backward of a step: keeps the values that they change."""
        if not self.waits:
            return
        self._random = self._trained.rng.snapshot()
        fp8 = self._trained.step.features.fp8
        if fp8 is not None and fp8.scales is not None:
            self._histories = {name: history.clone() for name, history in fp8.scales.histories().items()}

    def late_numbers(self, objective: Objective) -> Tensor:
        """Returns the largest local results of a step and their ranks, for `report`: fp64 [2, 3]."""
        return largest_of(self._results.table(objective, self._trained.optimizer.loss_scale.value))

    def report(self, iteration: int, numbers: Sequence[float]) -> None:
        """Warns of suspicious numbers of a step that may have been applied; takes what `late_numbers` returned."""
        values, ranks = numbers[: len(RESULTS)], numbers[len(RESULTS) :]
        for suspect in self._rule.suspects(values, ranks):
            self._say(f"iteration {iteration}: {_described(suspect)}")
        self._rule.learn(values)

    def examine(
        self, batches: Sequence[Batch], samples: int, objective: Objective, state: TrainState
    ) -> Objective | None:
        """Returns the objective of the step whose gradients are now in the buckets; None if it shall not be applied.

        The host waits for the device. Raises ResultError, on all ranks.
        """
        first, last = state.consumed_samples + 1, state.consumed_samples + samples
        step = ExaminedStep(state.iteration + 1, batches, f"{first} to {last}")
        table = self._table(objective, step, computation=0)
        if self._mode == DETERMINISM:
            return self._measure(step, table.tolist())
        values, ranks = HostCopy(largest_of(table)).read()
        suspects = self._rule.suspects(values, ranks)
        self._rule.learn(values)
        if self._state.unresolved is not None:
            self._resolve(step, table.tolist())
        if not suspects:
            return objective
        suspect = suspects[0]  # those behind it may follow from it
        if self._reproduced_at == step.iteration:
            return self._reproduced(step, suspect, objective)
        if self._reproduced_at == step.iteration - 1:
            self._say(f"iteration {step.iteration}: {_described(suspect)}, too")
            return self._reproduced(step, suspect, objective)
        with self._trained.groups.heartbeat.phase("rerun"):
            return self._find_cause(step, suspect, objective, table.tolist())

    def _find_cause(
        self, step: ExaminedStep, suspect: Suspect, objective: Objective, first: ResultTable
    ) -> Objective | None:
        """Computes a suspicious step again. Returns as `examine`, with the gradients of the step in the buckets."""
        self._say(f"iteration {step.iteration}: {_described(suspect)}; the step is computed again")
        objective, second = self._recompute(step)
        if differing := self._differing(first, second):
            objective, third = self._recompute(step)
            names = self._named(differing)
            numbers = f"{RESULTS[suspect.kind]}: {first[suspect.rank][suspect.kind]:.9g}, then "
            numbers += f"{second[suspect.rank][suspect.kind]:.9g} and {third[suspect.rank][suspect.kind]:.9g}"
            if self._differing(second, third):
                self._stop(
                    f"iteration {step.iteration}: {names} computed other numbers each time from the same input "
                    f"({numbers}): a processor or its memory is at fault. Nothing was saved; go on from the newest "
                    "checkpoint without this machine"
                )
            self._say(
                f"iteration {step.iteration}: a transient fault of {names}, which computed another number once "
                f"({numbers}). The run goes on with the last one; watch this machine"
            )
            values, ranks = largest_of(torch.tensor(third, dtype=torch.float64)).tolist()
            suspects, first = self._rule.suspects(values, ranks), third
            if not suspects:
                return objective
            suspect = suspects[0]
        experts = self._trained.run.model.num_experts is not None
        distance = replica_distance(self._trained.groups.mesh, experts=experts)
        if distance is None or self._trained.settings.dynamic_context is not None:
            return self._without_replica(step, suspect, objective, first)
        return self._compare_replicas(step, suspect, first, distance)

    def _compare_replicas(
        self, step: ExaminedStep, suspect: Suspect, first: ResultTable, distance: int
    ) -> Objective | None:
        """Lets each replica compute the microbatches of another one. Returns as `examine`. Raises ResultError."""
        trained, mesh = self._trained, self._trained.groups.mesh
        mine = ReplicaInput(step.batches, self._random)
        other = input_of_replica(mine, distance, trained.groups, trained.device)
        me = trained.groups.rank
        _, table = self._compute(step, other, owner=rank_at(mesh, me, distance))
        # The rank at -distance has computed the microbatches of a rank.
        differing = {
            rank for rank, row in enumerate(first) if self._differs_itself(row, table[rank_at(mesh, rank, -distance)])
        }
        culprits = [
            rank for rank in differing if self._replica(rank, distance) == self._replica(suspect.rank, distance)
        ]
        computer = rank_at(mesh, suspect.rank, -distance)
        numbers = f"{RESULTS[suspect.kind]} {suspect.value:.9g}, on rank {computer} {table[computer][suspect.kind]:.9g}"
        if culprits:
            self._stop(
                f"iteration {step.iteration}: a persistent fault of {self._named(culprits)}: the same input gave other "
                f"numbers on another machine ({numbers}). Nothing was saved; go on from the newest checkpoint without "
                "this machine"
            )
        if differing:
            pairs = {*differing, *(rank_at(mesh, rank, -distance) for rank in differing)}
            self._stop(
                f"iteration {step.iteration}: the suspicious number was confirmed by another machine, but "
                f"{self._named(pairs)} computed different numbers from the same input, and one of them is at fault. "
                "Nothing was saved; test these machines"
            )
        objective, _ = self._recompute(step)
        cause = "the data or the algorithm" + (", or the reduction" if suspect.kind == REDUCED_NORM else "")
        self._say(
            f"iteration {step.iteration}: another machine computed the same ({numbers}), so it is due to {cause}. "
            f"{_advice(step)}"
        )
        return self._reproduced(step, suspect, objective)

    def _without_replica(
        self, step: ExaminedStep, suspect: Suspect, objective: Objective, first: ResultTable
    ) -> Objective | None:
        """Decides on a reproduced number that no other rank can compute. Returns as `examine`. Raises ResultError."""
        saves, places = self._trained.run.checkpoint.save is not None, self._places()
        reproduced = (
            f"iteration {step.iteration}: rank {suspect.rank} ({places[suspect.rank]}) computed the same "
            f"{RESULTS[suspect.kind]} again ({suspect.value:.9g}), and no other replica can"
        )
        if math.isfinite(suspect.value) or not saves:
            self._say(
                f"{reproduced}: it is due to the data, the algorithm, or a persistent fault of this machine. "
                f"{_advice(step)}"
            )
            return self._reproduced(step, suspect, objective)
        self._state.unresolved = UnresolvedStep(
            step.iteration,
            self._layout,
            suspect.rank,
            places[suspect.rank],
            tuple(value.hex() for value in first[suspect.rank]),
        )
        self.saves = True
        self._stop(
            f"{reproduced}. The state before it was saved: start the same command on another machine to find out "
            "whether this one is at fault, or add --rerun-mode disabled to go on without an answer",
            RESUME_EXIT_CODE,
        )

    def _resolve(self, step: ExaminedStep, table: ResultTable) -> None:
        """Answers the question with which the run ended before. Raises ResultError if a machine is or was at fault, or
        may be."""
        unresolved = self._state.unresolved
        assert unresolved is not None
        if (unresolved.iteration, unresolved.layout) != (step.iteration, self._layout):
            self._say(
                f"iteration {unresolved.iteration} ended the run before, under {unresolved.layout}; it cannot be "
                f"compared with iteration {step.iteration} under {self._layout}"
            )
            self._state.unresolved = None
            return
        rank, places = unresolved.rank, self._places()
        before, now = unresolved.numbers, table[rank]
        if places[rank] == unresolved.place:
            self._stop(
                f"iteration {step.iteration}: rank {rank} is on {unresolved.place} again, where its numbers were "
                "suspicious; start the same command on another machine, or add --rerun-mode disabled to go on without "
                "an answer",
                RESUME_EXIT_CODE,
            )
        self._state.unresolved = None
        if self._differs_itself(before, now, elsewhere=True):
            self.saves = True
            self._stop(
                f"iteration {step.iteration}: {unresolved.place} is at fault: rank {rank} computed "
                f"{_list(before)} there and {_list(now)} on {places[rank]} from the same input ({', '.join(RESULTS)}). "
                "The same command goes on from here; do not use that machine",
                recurs=False,
            )
        self._reproduced_at = step.iteration
        self._say(
            f"iteration {step.iteration}: {places[rank]} computed the same as {unresolved.place}, so it is due to the "
            f"data or the algorithm. {_advice(step)}"
        )

    def _reproduced(self, step: ExaminedStep, suspect: Suspect, objective: Objective) -> Objective | None:
        """Leaves a step out whose suspicious number is due to its data, if the run shall. Raises ResultError after too
        many in a row."""
        self._reproduced_at, train = step.iteration, self._trained.run.train
        # The device leaves out numbers that are not finite.
        if not (train.skip_spiky_iterations and math.isfinite(suspect.value)):
            return objective
        limit = train.max_consecutive_nan_iterations
        if limit and {*range(step.iteration - limit, step.iteration)} <= {*self._state.left_out}:
            self._stop(
                f"iteration {step.iteration}: {limit} iterations in a row were left out (--skip-spiky-iterations, "
                "--max-consecutive-nan-iterations), and this one is suspicious, too: the run has diverged"
            )
        self._say(f"iteration {step.iteration} is left out (--skip-spiky-iterations)")
        self._trained.optimizer.drop_gradients()
        return None

    def _measure(self, step: ExaminedStep, first: ResultTable) -> Objective:
        """Computes the step twice, and prints how much the numbers have differed, every --log-interval steps."""
        objective, second = self._recompute(step)
        by_rank = [self._rule.note_noise(a, b) for a, b in zip(first, second, strict=True)]
        self._differences.append([max(of_kind) for of_kind in zip(*by_rank, strict=True)])
        if step.iteration % self._trained.run.logging.log_interval == 0:
            count, columns = len(self._differences), zip(*self._differences, strict=True)
            texts = [
                f"{name}: {sum(x == 0 for x in column)} equal, largest relative difference {max(column):.3g}"
                for name, column in zip(RESULTS, columns, strict=True)
            ]
            log.info("determinism of %d steps that were computed twice | %s", count, " | ".join(texts))
            self._differences.clear()
        return objective

    def _recompute(self, step: ExaminedStep) -> tuple[Objective, ResultTable]:
        """Computes the step again on the same ranks."""
        mine = ReplicaInput(step.batches, self._random)
        return self._compute(step, mine, owner=self._trained.groups.rank)

    def _compute(self, step: ExaminedStep, source: ReplicaInput, owner: int) -> tuple[Objective, ResultTable]:
        """Runs forward and backward of the microbatches of rank `owner`."""
        self._restore()
        self._trained.rng.load_state(source.random)
        objective = self._trained.step.forward_backward(source.batches, step.iteration - 1)
        return objective, self._table(objective, step, computation=1, owner=owner).tolist()

    def _restore(self) -> None:
        """Undoes the changes of a forward and backward."""
        self._trained.optimizer.drop_gradients()
        self._trained.rng.load_state(self._random)
        fp8 = self._trained.step.features.fp8
        if fp8 is not None and self._histories:
            fp8.load(self._histories)

    def _table(self, objective: Objective, step: ExaminedStep, computation: int, owner: int | None = None) -> Tensor:
        scale, rank = self._trained.optimizer.loss_scale.value, self._trained.groups.rank
        infinite = self._injects(step, computation, rank, rank if owner is None else owner)
        return self._results.table(objective, scale, infinite=infinite)

    def _injects(self, step: ExaminedStep, computation: int, rank: int, owner: int) -> bool:
        """Whether --error-injection-rate spoils a computation of the microbatches of rank `owner` on this one."""
        train, unresolved = self._trained.run.train, self._state.unresolved
        if not train.error_injection_rate:
            return False
        source = {TRANSIENT: rank, PERSISTENT: rank, CORRECT: owner}[train.error_injection_type]
        if train.error_injection_type == TRANSIENT and computation:
            return False
        if train.error_injection_type == PERSISTENT and unresolved and unresolved.iteration == step.iteration:
            return False  # another machine
        return Random(f"{train.seed} {step.iteration} {source}").randrange(train.error_injection_rate) == 0

    def _differing(self, first: ResultTable, second: ResultTable) -> list[int]:
        """Returns the ranks with other numbers; those whose own computation differs, if there are any."""
        differing = [rank for rank, pair in enumerate(zip(first, second, strict=True)) if self._rule.differing(*pair)]
        return [rank for rank in differing if self._differs_itself(first[rank], second[rank])] or differing

    def _differs_itself(self, first: Sequence[float], second: Sequence[float], *, elsewhere: bool = False) -> bool:
        """Whether two results differ in numbers that a rank computes without others'. elsewhere: see ResultRule."""
        return not {*self._rule.differing(first, second, elsewhere=elsewhere)}.isdisjoint(_OWN)

    @property
    def _layout(self) -> str:
        return ", ".join(f"{axis} {size}" for axis, size in self._trained.groups.mesh.sizes.items())

    def _replica(self, rank: int, distance: int) -> int:
        return self._trained.groups.mesh.coordinates(rank)["dp"] // distance

    def _named(self, ranks: Iterable[int]) -> str:
        places, ordered = self._places(), sorted(ranks)
        names = ", ".join(f"rank {rank} ({places[rank]})" for rank in ordered[:_NAMED])
        return names + (f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else "")

    def _places(self) -> list[str]:
        """Returns the host and device of each rank. Communication: one gather over the world, at the first call."""
        if not self._all_places:
            device = self._trained.device
            place = socket.gethostname() + (f", GPU {device.index}" if device.type == "cuda" else "")
            self._all_places = gather_objects(place, self._trained.groups.world)
        return self._all_places

    def _say(self, text: str) -> None:
        if self._trained.groups.rank == 0:
            log.warning(text)

    def _stop(self, message: str, exit_code: int = VALIDATION_EXIT_CODE, *, recurs: bool = True) -> NoReturn:
        self._restore()
        raise ResultError(message, exit_code, recurs=recurs)


def build_result_check(trained: TrainedModel, squares: SquareSum) -> ResultCheck | None:
    """Returns the examiner of the steps of a run, None if its flags ask for nothing. squares: the kernel of norms."""
    train = trained.run.train
    examines = train.check_for_spiky_loss or train.check_for_large_grads or train.result_mode != DISABLED
    return ResultCheck(trained, squares) if examines and not train.skip_train else None


def _described(suspect: Suspect) -> str:
    return f"{RESULTS[suspect.kind]} of rank {suspect.rank} is {suspect.value:.4g}, which is {suspect.why}"


def _advice(step: ExaminedStep) -> str:
    return f"--iterations-to-skip {step.iteration} leaves its data out, samples {step.samples} of the run"


def _list(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.9g}" for value in values)
