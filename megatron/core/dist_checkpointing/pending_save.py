"""A checkpoint on its way to disk.

[Note: parts of a save]
1. The first rank makes a hidden folder. The ranks agree on the rectangles that each of them writes, and copy what they
   write to host memory if training shall go on. Collective.
2. Every rank writes and syncs its files.
3. The first rank gathers their names and checksums. Collective.
4. The first rank writes metadata.json, gives the folder its name, rewrites the tracker and deletes old checkpoints.
5. The first rank tells the others how that went. Collective.

Without staging parts 2 to 5 are done by `finish`. With staging a thread does parts 2 and 4, which communicate with
nobody, and the main thread does part 3 and part 5 at the end of a training step: all ranks at the same one, when
`remaining` says so on each of them.

A local checkpoint (local_save.py) is saved in these parts, too, but each rank has a folder of its own and publishes it.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megatron.base.errors import CheckpointError
from megatron.base.log import get_logger
from megatron.core.dist_checkpointing.coordination import on_first, patient, reduce_on_first
from megatron.core.dist_checkpointing.folders import begin, prune, publish
from megatron.core.dist_checkpointing.planner import ShardedSavePlanner, by_name
from megatron.core.dist_checkpointing.sharded_tensor import ShardedTensor
from megatron.core.dist_checkpointing.staging import Staging
from megatron.core.dist_checkpointing.storage import SafetensorsWriter
from megatron.core.groups import Group
from megatron.core.streams.stream import Work

log = get_logger(__name__)


class PendingSave:
    """A save from its first part to its last; see [Note: parts of a save].

    iteration: of the checkpoint. seconds: for which this rank has written and published so far. sent_bytes: to the ranks
    that hold replicas of a local checkpoint. replication_seconds: for which that took.
    """

    def __init__(
        self,
        root: Path,
        iteration: int,
        tensors: Sequence[ShardedTensor],
        state: dict[str, Any],
        *,
        group: Group,
        keep: int | None,
        staging: Staging | None = None,
        constant: Sequence[ShardedTensor] = (),
    ) -> None:
        """Does the first part. Arguments and errors are those of `store.save`. Collective over `group`.

        staging: holds copies of `tensors` and writes them in the background; without it they must not change before
        `finish`. constant: further tensors, which never change and so are not copied.
        """
        assert iteration >= 0 and (keep is None or keep >= 1), f"iteration {iteration}, keep {keep}"
        self.iteration, self.seconds = iteration, 0.0
        self.sent_bytes, self.replication_seconds = 0, 0.0
        self._root, self._group, self._keep, self._staging = root, group, keep, staging
        self._planner, self._plan, self._metadata = ShardedSavePlanner(), SavePlan([]), Metadata({})
        self._results: list[WriteResult] = []  # of this rank, and on the first rank of all
        self._are_gathered = False
        self._folder: Path | None = None
        self._final: Path | None = None
        with self._all_or_nothing():
            self._folder = self._begin()
            reduce_on_first(group, "checkpoint plan", lambda: self._local_plan(tensors, constant), self._check_plans)
        self._writer = SafetensorsWriter(
            self._folder, iteration, group.rank, copy.deepcopy(state), self._planner.resolve_data
        )
        self._work = self._start(self._write)

    @property
    def remaining(self) -> int:
        """The parts that the thread of this rank has not ended: 2 while it writes files, then 1, and 0 at last."""
        is_busy = self._work is not None and not self._work.is_completed()
        return is_busy if self._are_gathered else 1 + is_busy

    def gather(self) -> None:
        """Waits for the files of all ranks, after which the first one publishes. May be called again.

        Collective over `group`. Raises CheckpointError on all ranks.
        """
        if self._are_gathered:
            return
        with self._all_or_nothing():
            reduce_on_first(self._group, "checkpoint write", self._written, self._take)
            self._share()
        self._are_gathered = True
        self._work = self._start(self._publish) if self._is_publisher else None

    def finish(self) -> Path:
        """Waits for the end of the save and returns the checkpoint's folder. Errors as `gather`."""
        self.gather()
        with self._all_or_nothing():
            return self._agree_on_end()

    @property
    def _is_publisher(self) -> bool:
        """Whether this rank makes the folder, publishes it, and deletes it after an error."""
        return self._group.rank == 0

    def _begin(self) -> Path:
        return on_first(self._group, "checkpoint begin", lambda: begin(self._root, self.iteration))

    def _share(self) -> None:
        """Nothing: the first rank alone needs the results of all."""

    def _agree_on_end(self) -> Path:
        return on_first(self._group, "checkpoint publish", self._published)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Deletes the hidden folder after an error in the body, which becomes the error of the save."""
        try:
            with patient(self._group):
                yield
        except BaseException as error:
            # By now every rank has stopped writing, or is lost.
            if self._is_publisher and self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise CheckpointError(
                    f"could not save iteration {self.iteration} to {self._root}, earlier checkpoints are untouched: "
                    f"{error}"
                ) from error
            raise

    def _local_plan(self, tensors: Sequence[ShardedTensor], constant: Sequence[ShardedTensor]) -> SavePlan:
        sources = tensors if self._staging is None else self._staging.copy(tensors)
        self._planner.set_up_planner(by_name([*sources, *constant]))
        self._plan = self._planner.create_local_plan()
        return self._plan

    def _check_plans(self, plans: list[SavePlan]) -> None:
        _, self._metadata = self._planner.create_global_plan(plans)

    def _start(self, part: Callable[[], None]) -> Work | None:
        """A thread begins with the part; None where there is no thread, and `_end` does it."""
        return None if self._staging is None else self._staging.writer.run(part, part.__name__)

    def _end(self, part: Callable[[], None]) -> None:
        if self._work is None:
            part()
        else:
            self._work.synchronize()

    def _write(self) -> None:
        if self._staging is not None:
            self._staging.synchronize()
        started = time.perf_counter()
        self._results = self._writer.write(self._plan)
        self.seconds += time.perf_counter() - started
        nbytes = sum(result.size_in_bytes for result in self._results)
        self._group.heartbeat.wrote(nbytes, time.perf_counter() - started)

    def _written(self) -> list[WriteResult]:
        with self._group.heartbeat.working("writing its files"):
            self._end(self._write)
        return self._results

    def _take(self, results: list[list[WriteResult]]) -> None:
        self._results = [result for rank in results for result in rank]

    def _publish(self) -> None:
        assert self._folder is not None
        started = time.perf_counter()
        self._complete(self._folder)
        self._final = publish(self._root, self.iteration, self._folder)
        if self._keep is not None:
            try:
                prune(self._root, self.iteration, self._keep)
            except OSError as error:  # the new checkpoint is in place
                log.warning("old checkpoints in %s could not be deleted: %s", self._root, error)
        self.seconds += time.perf_counter() - started

    def _complete(self, folder: Path) -> None:
        """Writes metadata.json into the folder."""
        self._writer.finish(self._writer.manifest(self._metadata, self._results))

    def _published(self) -> Path:
        with self._group.heartbeat.working("publishing the checkpoint"):
            self._end(self._publish)
        assert self._final is not None
        return self._final
