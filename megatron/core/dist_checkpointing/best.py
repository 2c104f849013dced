"""The file that names the best checkpoint of a run, by a figure of its evaluation: ROOT/best_checkpoint.json.

It names a checkpoint that is complete, and `prune` never deletes that one. One rank calls this.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from megatron.base.log import get_logger
from megatron.base.read_file import read_json
from megatron.base.write_file import replace_file

BEST = "best_checkpoint.json"
log = get_logger(__name__)


@dataclass(frozen=True)
class BestCheckpoint:
    """The iteration of a checkpoint, and the value of the figure that chose it."""

    iteration: int
    figure: str
    value: float


def read_best(root: Path) -> BestCheckpoint | None:
    """Returns the best checkpoint under `root`; None if no file names one, or the file cannot be read, which a log line
    says."""
    path = root / BEST
    if not path.exists():
        return None
    try:
        content = read_json(path)
        return BestCheckpoint(int(content["iteration"]), str(content["figure"]), float(content["value"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s is damaged and names no checkpoint: %s", path, error)
        return None


def write_best(root: Path, best: BestCheckpoint | None) -> None:
    """Names the best checkpoint, or none. Raises OSError."""
    if best is None:
        (root / BEST).unlink(missing_ok=True)
        return
    replace_file(root / BEST, (json.dumps(dataclasses.asdict(best)) + "\n").encode())
