"""Keeps the garbage collector away from what collecting the tests makes."""

import gc

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests are a million objects that live until the end. Each full pass over them would take half a second,
    and every test that calls gc.collect() makes one."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
