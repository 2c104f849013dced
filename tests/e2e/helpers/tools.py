"""Runs a tool of tools/ in a process of `launch`: the driver `tests.e2e.helpers.tools:run`, the tool's file first."""

import runpy
import sys


def run(argv):
    """As `python tools/<argv[0]> <the rest>`."""
    sys.argv = [f"tools/{argv[0]}", *argv[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
