"""Names the checkpoint whose weights had the best evaluation."""

from __future__ import annotations

from pathlib import Path

from megatron.base.errors import CheckpointError
from megatron.base.log import get_logger
from megatron.core.dist_checkpointing.best import BEST, BestCheckpoint, read_best, write_best
from megatron.core.dist_checkpointing.folders import find, folder_name

log = get_logger(__name__)


class BestEvaluation:
    """Compares evaluations with the best one of a run, on its first rank.

    An evaluation comes before the save of its iteration, and there may be none. So the figure is a candidate until
    `settle` sees that the newest checkpoint has its iteration.
    """

    def __init__(self, root: Path, figure: str, iteration: int) -> None:
        """root: the folder of the checkpoints. figure: the name of what is compared; more is better. iteration: where
        the run begins. A best checkpoint behind it belongs to a branch of the run that was left."""
        self._root, self._figure = root, figure
        self._candidate: BestCheckpoint | None = None
        best = read_best(root)
        if best is not None and (best.iteration > iteration or best.figure != figure):
            log.warning("%s names iteration %d, which this run does not have; it is removed", BEST, best.iteration)
            self._write(None)

    def add(self, iteration: int, value: float) -> None:
        """Notes the evaluation of an iteration."""
        self._candidate = BestCheckpoint(iteration, self._figure, value)

    def settle(self) -> None:
        """Names the checkpoint of the last evaluation if it is saved, and better than all before. A save may be under
        way: the evaluation waits for it until the next one takes its place."""
        candidate, newest = self._candidate, self._newest()
        if candidate is None or newest is None or newest.name < folder_name(candidate.iteration):
            return
        self._candidate = None
        best = read_best(self._root)
        if newest.name == folder_name(candidate.iteration) and (best is None or candidate.value > best.value):
            self._write(candidate)
            log.info(
                "best checkpoint so far: iteration %d, %s %.6g", candidate.iteration, self._figure, candidate.value
            )

    def _newest(self) -> Path | None:
        try:
            return find(self._root, None)
        except CheckpointError:  # another part of the run reports it
            return None

    def _write(self, best: BestCheckpoint | None) -> None:
        try:
            write_best(self._root, best)
        except OSError as error:  # training does not need it
            log.warning("%s could not be written: %s", self._root / BEST, error.strerror)
