"""Counts the file operations of a process below given folders, by Python's audit hooks, to kill it at each of them."""

import os
import sys
from pathlib import Path

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.copyfile", "shutil.rmtree", "os.listdir")


def on_each(folders, call, but=()):
    """Calls call(number from 1) before each later event of this process below one of the folders, except those in
    `but`.
    """
    below, not_below = (tuple(f"{Path(folder)}{os.sep}" for folder in each) for each in (folders, but))
    count = 0

    def hook(event, args):
        nonlocal count
        if event not in EVENTS or not isinstance(args[0], str | os.PathLike):
            return
        path = os.fspath(args[0])
        if path.startswith(below) and not path.startswith(not_below):
            count += 1
            call(count)

    sys.addaudithook(hook)
