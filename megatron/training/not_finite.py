"""Ends a run whose numbers are not finite any more with an error that names the first such tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.base.errors import TrainingError
from megatron.core.comm.collectives import gather_objects
from megatron.training.loop import Callback
from megatron.training.state import StepReport
from megatron.training.trainer import Trainer

ADVICE = "go on from the newest checkpoint, with a smaller --lr or past the data with --iterations-to-skip"


class NotFinite(Callback):
    """Stops the run after --max-consecutive-nan-iterations, and prevents a normal end with weights that are not
    finite."""

    def is_due(self, trainer: Trainer) -> bool:
        """When this step may be the last of the limit, because its gradients will be looked at."""
        return trainer.nan_steps + 1 >= trainer.run.train.max_consecutive_nan_iterations > 0

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        """Raises TrainingError on all ranks when the limit is reached."""
        limit = trainer.run.train.max_consecutive_nan_iterations
        if not limit or trainer.nan_steps < limit:
            return
        raise TrainingError(
            f"gradients were not finite in {limit} iterations in a row, the last one {report.iteration}: "
            f"{_where(trainer)} (--max-consecutive-nan-iterations). Nothing was saved since; {ADVICE}"
        )

    def end(self, trainer: Trainer, reason: str | None) -> None:
        """Raises TrainingError on all ranks, before anything is saved, if the last step was bad and a weight is,
        too."""
        if trainer.bad_steps and (weight := first_weight(trainer)):
            raise TrainingError(
                f"the run ends at iteration {trainer.state.iteration} and weight {weight} is not finite. "
                f"It was not saved; {ADVICE}"
            )


def first_weight(trainer: Trainer) -> str | None:
    """Returns the first parameter of the model that is not finite.
    Communication: one gather of names over the world."""
    trainer.data_parallel.synchronize()
    frozen = ((name, p.detach()) for name, p in trainer.parameters.items() if p.slot is None)
    trained = ((piece.name, tensor) for piece, tensor in trainer.data_parallel.weights())
    bad = _not_finite(frozen) | _not_finite(trained)
    return _first(
        [(_stage(trainer, name), number, name) for number, name in enumerate(trainer.parameters) if name in bad],
        trainer,
    )


def first_gradient(trainer: Trainer) -> str | None:
    """Returns the first parameter in backward, from the loss on, whose gradient of the last step is not finite.

    Communication: one gather of names over the world.
    """
    bad = _not_finite((name, tensor) for name, _, tensor in trainer.data_parallel.gradients())
    return _first(
        [(-_stage(trainer, name), -number, name) for number, name in enumerate(trainer.parameters) if name in bad],
        trainer,
    )


def _where(trainer: Trainer) -> str:
    if weight := first_weight(trainer):
        return f"weight {weight} is not finite"
    if gradient := first_gradient(trainer):
        return f"gradient of {gradient} is not finite"
    return "each number of the last one is finite, their norm is not"


def _not_finite(tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    return {name for name, tensor in tensors if not torch.isfinite(tensor).all()}


def _stage(trainer: Trainer, name: str) -> int:
    return trainer.model.stage_of(name) or 0


def _first(entries: list[tuple[int, int, str]], trainer: Trainer) -> str | None:
    """Returns the minimum of all ranks' entries: (stage, position in it, name)."""
    of_ranks = gather_objects(min(entries, default=None), trainer.groups.world)
    return min((entry for entry in of_ranks if entry), default=(0, 0, None))[2]
