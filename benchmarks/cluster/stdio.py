"""Starts the process of a host and communicates with it: JSON lines on stdin, JSON lines on stdout."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

Serve = Callable[[Iterable[str], Callable[[Any], None], list[str]], None]


def run_worker(description: str | None, serve: Serve) -> None:
    """Calls `serve(requests, answer, systems)`, which ends with stdin. Output of libraries goes to stderr."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--systems", nargs="+", required=True)
    args = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(args.threads)
    serve(sys.stdin, lambda value: print(json.dumps(value), file=replies), args.systems)
