"""Flags of a dry run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import Need, flag
from megatron.config.interval import RANKS


@dataclass(frozen=True, kw_only=True)
class DryRunConfig:
    """Whether to trace a run instead of starting it, and for how many processes."""

    dry_run: bool = flag(
        False,
        "start nothing: trace a step of this run for its first and its last pipeline rank, on a machine without devices "
        "or data, and print the memory that it takes",
    )
    dry_run_world_size: int | None = flag(
        None,
        "processes of the run that --dry-run traces; default the launcher's number, which is 1 without one",
        name="--world-size",
        within=RANKS,
        needs=Need(lambda run: run.dry_run.dry_run, "the launcher sets the number of processes", "add --dry-run"),
    )

    def ranks(self, launched: int) -> int:
        """Returns the processes of the run, of which `launched` have been started."""
        return self.dry_run_world_size or launched
