"""Programs that show this project in parts: each part is printed, and so is every command before it runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


class PartFailedError(Exception):
    """A part of a program failed; the message is the one line to show."""


def run_parts(program: str, parts: Mapping[str, Callable[[], None]]) -> dict[str, float] | None:
    """Runs the parts in order, below their titles. Returns the seconds of each; None if one failed, which is named."""
    seconds: dict[str, float] = {}
    for number, (title, part) in enumerate(parts.items(), start=1):
        print(f"\n=== {number}/{len(parts)} {title}\n", flush=True)
        started = time.monotonic()
        why = ""
        try:
            part()
        except PartFailedError as error:
            why = str(error)
        except KeyboardInterrupt:
            why = "interrupted"
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"
        if why:
            print(f"\n{program} stopped at '{title}': {why}", file=sys.stderr, flush=True)
            return None
        seconds[title] = time.monotonic() - started
    return seconds


def python(root: Path) -> str:
    """Returns this interpreter, as a path relative to `root` if it lies below it."""
    path = Path(sys.executable)
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def run_command(command: Sequence[str], log: Path) -> None:
    """Prints a command, runs it, and keeps its output in a file. Raises PartFailedError if it fails."""
    print(f"{format_command(command)}\n", flush=True)
    code = stream(command, log, terminal=sys.stdout.isatty())
    if code:
        raise PartFailedError(f"the command ended with exit code {code}; its output is above and in {log}")


def format_command(command: Sequence[str], width: int = 110) -> str:
    """Formats the command as it is typed, broken before flags into lines of at most `width` columns if possible."""
    chunks: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--"):
            chunks.append([])
        chunks[-1].append(word)
    lines = [""]
    for chunk in map(shlex.join, chunks):
        if lines[-1] and len(lines[-1]) + len(chunk) + 3 > width:
            lines.append("   ")
        lines[-1] += f" {chunk}" if lines[-1] else chunk
    return " \\\n".join(lines)


def stream(command: Sequence[str], log: Path, *, terminal: bool) -> int:
    """Runs a command; its output goes to stdout immediately, and to `log` in plain text. Returns the exit code.

    With `terminal` the command writes to a pseudo-terminal, so that it draws its progress bar.
    """
    source, sink = os.openpty() if terminal else os.pipe()
    environment = {**os.environ, "COLUMNS": str(shutil.get_terminal_size().columns)}
    process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment)
    os.close(sink)
    received = bytearray()
    try:
        while chunk := _read(source):
            received += chunk
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        return process.wait()
    finally:
        process.terminate()
        process.wait()
        os.close(source)
        log.write_text(plain_text(received.decode("utf-8", errors="replace")), encoding="utf-8")


def plain_text(text: str) -> str:
    """Returns a terminal's text without escape sequences, with only the final state of each line."""
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def _read(source: int) -> bytes:
    """Reads some bytes, or none at the end, which Linux reports as an error if `source` is a terminal."""
    try:
        return os.read(source, 1 << 16)
    except OSError:
        return b""
