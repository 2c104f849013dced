"""The bytes that the roofline reads from a kernel's source, against the addresses that the interpreter sees; run by
tests/unit/kernels/test_triton.py.
"""

import importlib
from types import SimpleNamespace
from unittest import mock

import pytest

from benchmarks import triton_kernels
from benchmarks.roofline import nbytes
from benchmarks.triton_traffic import traffic

# It reads and writes the rows of a table that are looked up; the roofline counts the whole table, which is too much.
OF_SOME_ROWS = "embedding gradient"
SMALL = {"INNER": 96, "HEADS": 6, "GROUPS": 2, "HEAD": 16, "VOCABULARY": 300}
HIDDEN, TOKENS = 64, 8


def small_cases():
    with mock.patch.multiple(triton_kernels, **SMALL):
        return triton_kernels.cases(TOKENS, "cpu", HIDDEN)


@pytest.mark.parametrize("name", [name for name in small_cases() if name != OF_SOME_ROWS])
def test_the_source_names_what_is_read_and_written(name):
    executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    launch, found = executor.__call__, []

    def noted(self, *args, **options):
        arguments = dict(zip(self.arg_names, args, strict=True))
        read, written = traffic(SimpleNamespace(fn=self.fn), arguments)
        found.append(sum(nbytes(arguments[each]) for each in (*read, *written)))
        return launch(self, *args, **options)

    with mock.patch.object(executor, "__call__", noted), triton_kernels.counted() as total:
        small_cases()[name].call()
    assert len(found) == 1
    # AdamW reads the columns of its table that have a run.
    assert found[0] == pytest.approx(total[0], rel=0.01 if "AdamW" in name else 0.0)
