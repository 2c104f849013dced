"""Moments at which to kill a process: what it does to files below some folders, counted by Python's audit hooks."""

import os
import sys
from pathlib import Path

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.copyfile", "shutil.rmtree", "os.listdir")


def on_each(folders, call):
    """Call call(number from 1) before each of this process's events below one of the folders, from now on."""
    below = tuple(f"{Path(folder)}{os.sep}" for folder in folders)
    count = 0

    def hook(event, args):
        nonlocal count
        if event in EVENTS and isinstance(args[0], str | os.PathLike) and os.fspath(args[0]).startswith(below):
            count += 1
            call(count)

    sys.addaudithook(hook)
