"""Finds a checkpoint's folder and format in a folder of Megatron-LM's checkpoints."""

from __future__ import annotations

from pathlib import Path

from megatron.base.errors import CheckpointError
from megatron.base.read_file import read_json, read_regular
from megatron.core.dist_checkpointing.dcp_folder import METADATA
from megatron.core.dist_checkpointing.folders import RELEASE, TRACKER, folder_name, is_foreign, is_iteration

CLASSIC, TORCH_DIST = "torch", "torch_dist"  # as --ckpt-format names them
_CONFIG = "metadata.json"


def iteration_folder(root: Path, step: int | None) -> Path:
    """Returns the folder of iteration `step`, or of the tracker's, under `root`; or `root` if it is a checkpoint
    itself.

    Raises CheckpointError if it is missing.
    """
    if is_foreign(root):
        return root
    tracker = root / TRACKER
    if step is None:
        try:
            text = read_regular(tracker).decode("ascii", errors="replace").strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{tracker} cannot be read ({reason}); give a checkpoint's folder") from error
        if not (text == RELEASE or is_iteration(text)):
            raise CheckpointError(f"{tracker} holds {text[:40]!r} instead of an iteration; give a checkpoint's folder")
        folder = root / (RELEASE if text == RELEASE else folder_name(int(text)))
    else:
        folder = root / folder_name(step)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not there")
    return folder


def format_of(folder: Path) -> str:
    """Returns CLASSIC or TORCH_DIST, by the content of the folder. Raises CheckpointError for unsupported formats."""
    if (folder / _CONFIG).is_file():
        backend = _backend(folder / _CONFIG)
        if backend != TORCH_DIST:
            raise CheckpointError(
                f"{folder} is in the format {backend!r}, which is not read; save it again with --ckpt-format torch_dist"
            )
        return TORCH_DIST
    if any(folder.glob("mp_rank_*")):
        return CLASSIC
    if (folder / METADATA).is_file():
        raise CheckpointError(
            f"{folder} is in the format torch_dcp or fsdp_dtensor (it has {METADATA} and no {_CONFIG}), which is not "
            "read; save it with --ckpt-format torch_dist"
        )
    raise CheckpointError(
        f"{folder} holds neither a {_CONFIG} (--ckpt-format torch_dist) nor a folder mp_rank_... (--ckpt-format "
        "torch): it is not a checkpoint of Megatron-LM"
    )


def _backend(path: Path) -> str:
    try:
        content = read_json(path)
        return str(content["sharded_backend"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} does not say which format of Megatron-LM's the checkpoint has: {type(error).__name__}: {error}"
        ) from error
