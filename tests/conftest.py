"""Keeps the garbage collector away from what collecting the tests makes."""

import gc
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also if the parent of pytest ignores it, as a shell does behind an &."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests are a million objects that live until the end. Each full pass over them would take half a
    second, and every test that calls gc.collect() makes one."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
