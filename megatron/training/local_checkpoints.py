"""Local checkpoints (--non-persistent-save-interval): in the memory or on a disk of each host, for a quick restart.

[Note: which local checkpoint counts]
A run has a number, which its --save folder and the folders of its local checkpoints hold. A run that begins from
anything but a local checkpoint gets another number. So nothing is loaded that a different run has left under the same
name, or that this run did before somebody went back with --ckpt-step.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from megatron.base.errors import CheckpointError
from megatron.base.log import get_logger
from megatron.config.checkpoint import MEMORY, CheckpointConfig
from megatron.core.dist_checkpointing.coordination import PATIENCE, on_all, on_first
from megatron.core.dist_checkpointing.folders import is_foreign
from megatron.core.dist_checkpointing.local_folders import (
    delete_run,
    delete_stale,
    is_local,
    read_run_id,
    renew_run_id,
    run_folder,
)
from megatron.core.dist_checkpointing.local_load import newest_local
from megatron.core.dist_checkpointing.local_save import LocalPlace
from megatron.core.dist_checkpointing.replication import replication_groups
from megatron.core.groups import Group, Groups, thread_group
from megatron.training.logging.timed_phase import timed_phase

log = get_logger(__name__)
_ITERATION = re.compile(r"iter_(\d+)")
_MEMORY_FOLDER = "/dev/shm"  # a file system in the memory of the host, which outlives processes


class LocalCheckpoints:
    """Those of one run. complete: iteration of the newest one that all ranks have published, None without one.

    place: where this rank keeps its part, from `start` on.
    """

    def __init__(self, config: CheckpointConfig, loaded: Path | None, groups: Groups, timeout_seconds: float) -> None:
        """loaded: the checkpoint from which the run continues. Collective over the world."""
        self.complete = _number(loaded) if loaded is not None and is_local(loaded) else None
        self.place: LocalPlace | None = None
        self._config, self._world = config, groups.world
        self._run = _run_folder(config, groups.world)
        factor, jump = config.replicas, config.replication_jump or _ranks_of_host(groups.world)
        self._replicas = thread_group(
            replication_groups(groups.world.size, jump, factor), groups, PATIENCE * timeout_seconds
        )
        if factor > 1 and self._replicas.size == 1:
            log.warning(
                "no replicas of local checkpoints: --replication-factor %d needs %d ranks at a distance of %d, and there "
                "are %d ranks",
                *(factor, factor, jump, groups.world.size),
            )

    @property
    def words(self) -> str:
        """Where they are, for a line of the log."""
        return "in memory" if self._config.non_persistent_ckpt_type in MEMORY else f"in {self._run}"

    def start(self) -> None:
        """Gives a run that did not begin from a local checkpoint its number, and deletes the folders of others.

        To be called when the lock on --save is held. Collective over the world; raises CheckpointError on all ranks.
        """
        save, is_resumed = Path(self._config.save or ""), self.complete is not None
        run_id = on_first(self._world, "run number", lambda: read_run_id(save) if is_resumed else renew_run_id(save))
        assert run_id is not None
        on_all(self._world, "run number", lambda: delete_stale(self._run, run_id))
        self.place = LocalPlace(self._run, run_id, self._replicas, self._config.replicas)

    def end(self) -> None:
        """Deletes all when the run has saved a checkpoint that persists. No communication."""
        if self.place is not None:
            delete_run(self._run, self.place.run_id)


def newest_start(
    flags: CheckpointConfig, config: CheckpointConfig, checkpoint: Path | None, groups: Groups
) -> tuple[CheckpointConfig, Path | None]:
    """Returns (the flags about checkpoints, the checkpoint to load), with a local checkpoint that is newer than the one
    that persists in its place.

    flags: as they were given. config, checkpoint: see `find_start`. Collective over the world. A local checkpoint that
    cannot be read is named in a warning, and the one that persists is loaded.
    """
    world = groups.world

    def look() -> tuple[str | None, int] | None:
        """(number of the run, iteration of the checkpoint that persists), None where local ones are not looked for."""
        if flags.save is None or not _looks_in_save(flags, config, checkpoint):
            return None
        is_own = checkpoint is not None and not config.finetune and not is_foreign(checkpoint)
        return read_run_id(Path(flags.save)), _number(checkpoint) if checkpoint is not None and is_own else 0

    try:
        # A shared file system may show the ranks different states for a while: what the first one sees counts.
        progress = on_first(world, "run number", look)
        if progress is None:
            log.info("local checkpoints are not looked for: this run does not continue from its --save")
            return config, checkpoint
        run_id, after = progress
        path = None
        if run_id is not None:
            with timed_phase("find-local-checkpoint", groups):
                path = newest_local(_run_folder(flags, world), run_id, after=after, group=world)
    except CheckpointError as error:
        if world.rank == 0:
            log.warning("local checkpoints are not used: %s", error)
        return config, checkpoint
    if path is None:
        log.info("no local checkpoint is newer than iteration %d", after)
        return config, checkpoint
    log.info("going on from the local checkpoint %s", path)
    return flags, path


def _number(checkpoint: Path) -> int:
    """Returns the iteration in the name of a checkpoint's folder, also of one that was about to be replaced."""
    match = _ITERATION.search(checkpoint.name)
    return int(match[1]) if match else 0


def _looks_in_save(flags: CheckpointConfig, config: CheckpointConfig, checkpoint: Path | None) -> bool:
    """Whether the run continues from its own progress in --save, or would if there were some."""
    if flags.finetune or flags.ckpt_step is not None or not flags.may_continue:
        return False
    if checkpoint is not None and flags.pretrained_checkpoint is None and (config.finetune or is_foreign(checkpoint)):
        return True
    return os.path.abspath(flags.load or flags.save or "") == os.path.abspath(flags.save or "")


def _run_folder(config: CheckpointConfig, world: Group) -> Path:
    """Returns the folder of the run on the host of this rank. No communication."""
    root = _MEMORY_FOLDER if config.non_persistent_ckpt_type in MEMORY else config.non_persistent_local_ckpt_dir
    local_rank = str(world.rank % _ranks_of_host(world))
    return run_folder(Path((root or "").replace("{local_rank}", local_rank)), Path(config.save or ""))


def _ranks_of_host(world: Group) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
