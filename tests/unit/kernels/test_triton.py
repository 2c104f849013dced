"""The Triton kernels, without a GPU: in Triton's interpreter, which has to be chosen before Triton is imported.

Triton is no dependency of the tests: CUDA builds of torch bring it, and elsewhere `pip install triton` does.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "triton").glob("interpreted_*.py"))
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem.removeprefix("interpreted_"))
def test_equals_its_reference(file):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n0", str(file)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
def test_compiles_without_a_gpu():
    """For two generations of GPUs, as the layers launch the kernels; registers hold nearly everything."""
    command = [sys.executable, "-m", "benchmarks.triton_kernels", "compile"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("sm_")]
    assert {row[0] for row in rows} == {"sm_90", "sm_80"} and len(rows) > 50
    assert all(int(row[-3]) <= 128 for row in rows), "bytes of stack: registers spill"
