"""Runs of pretrain_gpt.py that save: the same run twice, and one that continues from the middle, to the same bytes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.case import Result, Setting, check
from benchmarks.gpu.driver import ROOT
from benchmarks.gpu.runs import COMMON, DECODER

STEPS, MIDDLE = 20, 10
TENSORS = ".safetensors"


def resumes_and_repeats(setting: Setting) -> Result:
    """Checks that --deterministic-mode gives the same checkpoint twice, and so does a run that was interrupted."""
    with tempfile.TemporaryDirectory() as folder:
        first, second, resumed = (Path(folder) / name for name in ("first", "second", "resumed"))
        run(setting, first, "")
        run(setting, second, "")
        run(setting, resumed, f"--load {first} --ckpt-step {MIDDLE}")
        expected = digests(first)
        for name, other in (("a second run", second), ("a resumed run", resumed)):
            found = digests(other)
            differing = sorted(path for path in expected if found.get(path) != expected[path])
            check(not differing, f"{name} saved other bytes in {len(differing)} files, first {differing[:1]}")
    return Result(
        f"after {STEPS} steps a second and a resumed run saved the same bytes: {len(expected)} file(s) of tensors"
    )


def run(setting: Setting, save: Path, flags: str) -> None:
    """Trains in a process of its own. Raises CheckError if it does not end well."""
    words = f"{COMMON} {DECODER} --train-iters {STEPS} --save {save} --save-interval {MIDDLE} {flags}"
    precise = "--bf16" if setting.cuda else ""
    device = f"--device {setting.device} --deterministic-mode --no-progress-bar"
    command = [sys.executable, "pretrain_gpt.py", *f"{words} {precise} {device}".split()]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    check(done.returncode == 0, f"exit code {done.returncode} of {' '.join(command[1:])}: {done.stderr[-400:]}")


def digests(save: Path) -> dict[str, str]:
    """Returns path -> digest of the files of tensors of the last checkpoint."""
    last = save / f"iter_{STEPS:07d}"
    found = {str(path.relative_to(last)): path for path in sorted(last.rglob(f"*{TENSORS}"))}
    check(bool(found), f"no files of tensors under {last.name}")
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()}
