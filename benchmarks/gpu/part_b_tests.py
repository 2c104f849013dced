"""Part B: the project's own GPU tests, some of them again under torch's CUDA sanitizer, and the threads of hooks."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
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
from benchmarks.gpu.record import LISTED
from benchmarks.gpu.runs import DECODER, start, trainer_of

JUNIT = "tests_gpu.xml"
WORKERS, TEST_SECONDS = 6, 100
# Tests of code that runs on several streams.
ON_STREAMS = ("data_parallel", "recompute", "activation_offload", "optimizer_offload", "weight_offload", "streams")
MESSAGE = 300  # characters of a failure's message; log.txt has all of it


def cases(setting: Setting) -> list[Case]:
    """Returns the cases of this part."""
    of = functools.partial
    return [
        Case("tests/gpu", of(run_tests, setting, ["tests/gpu"], {}, JUNIT), 60.0, 150.0),
        Case("hooks on one thread", of(hook_threads, setting), 5.0),
        Case("CUDA sanitizer", of(sanitized, setting), 30.0, 120.0),
    ]


def run_tests(setting: Setting, files: list[str], environment: dict[str, str], junit: str | None) -> Result:
    """Runs pytest in processes of its own. junit: the name of its report in the folder of the results."""
    command = [sys.executable, "-m", "pytest", *files, "-p", "no:cacheprovider", "--tb=short"]
    if setting.cuda and importlib.util.find_spec("xdist"):
        command += ["-n", str(WORKERS)]
    if importlib.util.find_spec("pytest_timeout"):
        command += ["--timeout", str(TEST_SECONDS)]
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "junit.xml"
        done = subprocess.run([*command, f"--junitxml={xml}"], cwd=ROOT, env=os.environ | environment, check=False)
        check(xml.exists(), f"pytest ended with {done.returncode} and without a report; see log.txt")
        counts, failures = read_junit(xml)
        if junit is not None:
            shutil.copyfile(xml, setting.out / junit)
    said = ", ".join(f"{count} {name}" for name, count in counts.items())
    values: dict[str, Any] = {**counts, LISTED: failures}
    check(not failures and done.returncode == 0, f"{said}, exit code {done.returncode}", values)
    return Result(said, values)


def sanitized(setting: Setting) -> Result:
    """Runs the tests of code on several streams while torch compares every kernel's streams with its tensors'."""
    setting.needs_cuda("torch's CUDA sanitizer")
    files = [f"tests/gpu/test_{name}.py" for name in ON_STREAMS]
    return run_tests(setting, files, {"TORCH_CUDA_SANITIZER": "1"}, None)


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
