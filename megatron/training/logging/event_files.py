"""Removes points from TensorBoard's event files that a continued run writes once more.

TensorBoard's own way, `purge_step`, hides the points of all tags from one step on, and so all those that are plotted
over samples, whose numbers are larger: it cannot serve a folder with both.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from megatron.base.log import get_logger
from megatron.base.write_file import replace_file

log = get_logger(__name__)

OVER_SAMPLES = " vs samples"  # ends the tags with samples as their x axis
_AROUND = 16  # bytes of a record besides its content: its length (8), and checksums of the length and the content


def drop_points_after(folder: Path, iteration: int, samples: int) -> None:
    """Removes points after `iteration`, or after `samples` where these are the x axis,
    from all event files in a folder.

    Each changed file is replaced at once. Raises OSError.
    """
    for path in sorted(folder.glob("*tfevents*")):
        if not path.is_file() or path.is_symlink():
            continue
        records = list(_records(path))
        remaining = [record for record in records if not _is_after(record, iteration, samples)]
        if len(remaining) == len(records):
            continue
        replace_file(path, b"".join(remaining))
        log.info("removed %d points after iteration %d from %s", len(records) - len(remaining), iteration, path)


def _records(path: Path) -> Iterator[bytes]:
    """Yields the records of a file with what is around them, up to one that a killed run did not complete."""
    with open(path, "rb") as file:
        while len(head := file.read(8)) == 8:
            (length,) = struct.unpack("<Q", head)
            body = file.read(length + _AROUND - 8)
            if len(body) < length + _AROUND - 8:
                return
            yield head + body


def _is_after(record: bytes, iteration: int, samples: int) -> bool:
    # Here, because it takes a third of a second, and most ranks have no writer.
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415

    event = Event.FromString(record[12:-4])
    return any(event.step > (samples if v.tag.endswith(OVER_SAMPLES) else iteration) for v in event.summary.value)
