"""Part B: the project's own GPU tests, some of them again under torch's CUDA sanitizer, and the threads of hooks."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.case import Case, Result, Setting, check
from benchmarks.gpu.driver import ROOT
from benchmarks.gpu.parts import START_SECONDS
from benchmarks.gpu.record import LISTED
from benchmarks.gpu.runs import DECODER, run_seconds, start, trainer_of

WORKERS, TEST_SECONDS = 12, 60
# Tests of code that runs on several streams.
ON_STREAMS = ("data_parallel", "recompute", "activation_offload", "optimizer_offload", "weight_offload", "streams")
MANY = (
    "attention_lse",
    "packed_attention",
    "kernels",
    "fp8",
    "experts",
    "fused",
    "transformer_engine",
)  # with many cases
FILE_SECONDS, MANY_SECONDS = 10.0, 25.0
MESSAGE = 300  # characters of a failure's message; log.txt has all of it


def cases(setting: Setting) -> list[Case]:
    """Returns the cases of this part: a file of tests each, those with few tests first."""
    of = functools.partial
    names = sorted(path.stem.removeprefix("test_") for path in (ROOT / "tests/gpu").glob("test_*.py"))
    names.sort(key=lambda name: name in MANY)

    def seconds(name: str) -> float:
        return START_SECONDS + (MANY_SECONDS if name in MANY else FILE_SECONDS)

    return [
        Case("hooks on one thread", of(hook_threads, setting), run_seconds(f"{DECODER} --bf16", 1)),
        *(Case(name, of(run_tests, setting, name, {}), seconds(name)) for name in names),
        *(Case(f"{name}, CUDA sanitizer", of(sanitized, setting, name), 2 * seconds(name)) for name in ON_STREAMS),
    ]


def run_tests(setting: Setting, name: str, environment: dict[str, str]) -> Result:
    """Runs a file of tests/gpu in processes of their own."""
    command = [sys.executable, "-m", "pytest", f"tests/gpu/test_{name}.py", "-p", "no:cacheprovider", "--tb=short"]
    if setting.cuda and name in MANY and importlib.util.find_spec("xdist"):
        command += ["-n", str(WORKERS)]
    if importlib.util.find_spec("pytest_timeout"):
        command += ["--timeout", str(TEST_SECONDS)]
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "junit.xml"
        done = subprocess.run([*command, f"--junitxml={xml}"], cwd=ROOT, env=os.environ | environment, check=False)
        check(xml.exists(), f"pytest ended with {done.returncode} and without a report; see log.txt")
        counts, failures = read_junit(xml)
    said = ", ".join(f"{count} {name}" for name, count in counts.items())
    values: dict[str, Any] = {**counts, LISTED: failures}
    check(not failures and done.returncode == 0, f"{said}, exit code {done.returncode}", values)
    return Result(said, values)


def sanitized(setting: Setting, name: str) -> Result:
    """Runs a file of tests while torch compares every kernel's streams with its tensors'."""
    setting.needs_cuda("torch's CUDA sanitizer")
    return run_tests(setting, name, {"TORCH_CUDA_SANITIZER": "1"})


def read_junit(path: Path) -> tuple[dict[str, int], list[str]]:
    """Returns (number of tests by result, one line for each test that failed)."""
    counts, failures = {"passed": 0, "failed": 0, "skipped": 0}, []
    for test in ElementTree.parse(path).getroot().iter("testcase"):
        bad = next((child for child in test if child.tag in ("failure", "error")), None)
        skipped = any(child.tag == "skipped" for child in test)
        counts["failed" if bad is not None else "skipped" if skipped else "passed"] += 1
        if bad is not None:
            message = " ".join((bad.get("message") or "").split())[:MESSAGE]
            failures.append(f"{test.get('classname', '').rpartition('.')[2]}::{test.get('name')} {message}")
    return counts, failures


def hook_threads(setting: Setting) -> Result:
    """Checks the rule of autograd that data parallelism relies on: all hooks of a backward run on one thread."""
    groups = start(setting)
    trainer = trainer_of(f"{DECODER} --bf16 --overlap-grad-reduce --ddp-bucket-size 4000", setting, groups)
    names: list[str] = []
    threads: set[int] = set()

    def note(name: str, _: Any) -> None:
        names.append(name)
        threads.add(threading.get_ident())

    for name, parameter in trainer.parameters.items():
        parameter.register_post_accumulate_grad_hook(functools.partial(note, name))
    trainer.train_step()
    device = torch.device(setting.device)
    missing = sorted(set(trainer.parameters) - set(names))
    check(not missing, f"no hook ran for {', '.join(missing)}")
    check(len(threads) == 1, f"hooks of one backward ran on {len(threads)} threads")
    own = threading.get_ident() in threads
    where = "the calling thread" if own else "the engine's thread of the device"
    return Result(f"{len(names)} hooks on {where} ({device.type}), {len(trainer.data_parallel.buckets)} buckets")
