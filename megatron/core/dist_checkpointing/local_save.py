"""Saves of local checkpoints: every rank publishes the part that its folder holds. See local_folders.py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.coordination import on_all, on_first, portable
from megatron.core.dist_checkpointing.folders import begin
from megatron.core.dist_checkpointing.local_folders import delete_others, make_rank_folder, rank_folder
from megatron.core.dist_checkpointing.manifest import Manifest, write_manifest
from megatron.core.dist_checkpointing.pending_save import PendingSave
from megatron.core.dist_checkpointing.replication import replicate
from megatron.core.dist_checkpointing.sharded_tensor import ShardedTensor
from megatron.core.dist_checkpointing.staging import Staging
from megatron.core.dist_checkpointing.storage import sync_folder
from megatron.core.groups import Group


@dataclass(frozen=True)
class LocalPlace:
    """Where a rank keeps its part. run: the folder of the run on this host. replicas: the group whose ranks keep copies
    of each other's files, over which a thread may communicate; `factor` folders hold each file."""

    run: Path
    run_id: str
    replicas: Group
    factor: int


class LocalSave(PendingSave):
    """A save of a local checkpoint. The one before is deleted when the next save begins, because until then a rank may
    fail to publish its part."""

    def __init__(
        self,
        place: LocalPlace,
        iteration: int,
        tensors: Sequence[ShardedTensor],
        state: dict[str, Any],
        *,
        group: Group,
        complete: int | None,
        staging: Staging,
        constant: Sequence[ShardedTensor] = (),
    ) -> None:
        """As PendingSave. complete: iteration of the last local checkpoint that all ranks have published."""
        self._place, self._complete_iteration = place, complete
        self._manifest: Manifest | None = None
        root = rank_folder(place.run, place.run_id, group.rank)
        super().__init__(root, iteration, tensors, state, group=group, keep=None, staging=staging, constant=constant)

    @property
    def _is_publisher(self) -> bool:
        return True

    def _begin(self) -> Path:
        def make() -> Path:
            make_rank_folder(self._place.run, self._place.run_id, self._group.rank)
            return begin(self._root, self.iteration)

        return on_all(self._group, "checkpoint begin", make)

    def _write(self) -> None:
        place, written = self._place, False
        delete_others(place.run, place.run_id, self._complete_iteration)
        try:
            super()._write()
            written = True
        finally:
            if place.replicas.size > 1:  # the other ranks wait for the files of this one, also when there are none
                self._replicate(has_files=written)

    def _replicate(self, *, has_files: bool) -> None:
        assert self._folder is not None
        started = time.perf_counter()
        names = sorted({result.storage_data.chunk.file for result in self._results}) if has_files else []
        self.sent_bytes = replicate(self._folder, names, self._place.factor, self._place.replicas)
        self.replication_seconds = time.perf_counter() - started

    def _share(self) -> None:
        self._manifest = on_first(
            self._group, "checkpoint share", lambda: self._writer.manifest(self._metadata, self._results)
        )

    def _complete(self, folder: Path) -> None:
        assert self._manifest is not None
        with portable():
            write_manifest(folder, self._manifest)
            sync_folder(folder)

    def _agree_on_end(self) -> Path:
        return on_all(self._group, "checkpoint publish", self._published)
