"""Prints the cases of parts as one line of JSON: the driver holds no torch, and the cases of a part need it."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.case import Setting
from benchmarks.gpu.parts import Planned


def listed(modules: dict[str, str], setting: Setting) -> dict[str, Any]:
    """Returns the fields of `Listing` (driver.py). modules: of the parts, by letter. One that fails stops no other."""
    cases: list[Planned] = []
    broken: dict[str, str] = {}
    for letter, module in modules.items():
        try:
            for case in importlib.import_module(module).cases(setting):
                limit = case.time_limit(toy=setting.toy)
                cases.append(Planned(letter, module, case.name, case.seconds, limit))
        except Exception as error:
            traceback.print_exc()
            broken[letter] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    torch = sys.modules.get("torch")
    return {"gpu": torch is not None and torch.cuda.is_available(), "cases": cases, "broken": broken}


def main(argv: Sequence[str]) -> None:
    """Prints the line. Whatever the modules print goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="+", help="LETTER=MODULE; a module has cases(setting)")
    parser.add_argument("--device", required=True)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    answer = os.dup(1)
    os.dup2(2, 1)
    modules = dict(word.split("=", 1) for word in args.modules)
    line = json.dumps(listed(modules, Setting(args.device, args.toy, args.out)))
    os.write(answer, line.encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
