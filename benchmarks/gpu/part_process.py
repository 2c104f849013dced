"""A process that runs cases of one part, and reports each as a JSON line to the driver (driver.py).

The lines are {"begin": name, "limit": seconds} and {"record": ...} of each case, and {"end": true}. A case that leaves
the GPU unusable, or full, ends the process without the last line: the driver then starts another one for the remaining
cases.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.case import Case, CheckError, Setting
from benchmarks.gpu.record import FAILED, OK, SKIPPED, NotRunError, Record

LEFT_BYTES = 1 << 30  # that a case may leave in use, such as the data of cases that share it
MESSAGE = 600  # characters of an exception that a record keeps; log.txt has all of it


def run_case(letter: str, case: Case) -> Record:
    """Runs a case and returns its record, whatever it raises."""
    begun = time.monotonic()

    def record(status: str, text: str, values: dict[str, Any] | None = None) -> Record:
        return Record(letter, case.name, status, round(time.monotonic() - begun, 2), text, values or {})

    try:
        result = case.run()
        return record(OK, result.text, result.values)
    except NotRunError as reason:
        return record(reason.status, str(reason))
    except CheckError as error:
        return record(FAILED, shortened(str(error)), error.values)
    except Exception as error:
        traceback.print_exc()
        return record(FAILED, shortened(f"{type(error).__name__}: {error}"))


def shortened(message: str) -> str:
    """Returns a message on one line, without its middle if it is long."""
    line = " ".join(message.split())
    return line if len(line) <= MESSAGE else f"{line[: MESSAGE // 2]} ... {line[-MESSAGE // 2 :]}"


def gpu_is_usable() -> bool:
    """Waits for the GPU and frees its cache. False after an error that no later call in this process recovers from, and
    if memory is left in use that later cases may need.
    """
    gc.collect()
    torch = sys.modules.get("torch")  # a part that did not import it has not used the GPU
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        print(f"the GPU cannot be used any more in this process: {error}", flush=True)
        return False
    left = torch.cuda.memory_allocated()
    if left > LEFT_BYTES:
        print(f"the case left {left / 2**30:.2f} GiB in use; another process takes the next one", flush=True)
    return bool(left <= LEFT_BYTES)


def run_cases(
    letter: str, cases: Sequence[Case], toy: bool, deadline: float, report: Callable[[dict[str, Any]], None]
) -> bool:
    """Runs the cases in order; returns False if the GPU became unusable. deadline: of monotonic time."""
    for case in cases:
        left = deadline - time.monotonic()
        if left <= 0.0 or (case.seconds > left and not toy):
            text = f"planned for {case.seconds:.0f} s, and {max(0.0, left):.0f} s were left"
            report({"record": vars(Record(letter, case.name, SKIPPED, 0.0, text))})
            continue
        report({"begin": case.name, "limit": case.time_limit(toy=toy)})
        print(f"--- {letter} {case.name}", flush=True)
        record = run_case(letter, case)
        report({"record": json.loads(record.to_json())})
        if not gpu_is_usable():
            return False
    return True


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, or 1 if cases are left for another process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("letter")
    parser.add_argument("module", help="has cases(setting), which returns a list of Case")
    parser.add_argument("--events", type=int, required=True, help="file descriptor of the lines")
    parser.add_argument("--seconds", type=float, required=True, help="until the process has to end")
    parser.add_argument("--device", required=True)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", type=json.loads, required=True, help="names of the cases to run, in their order")
    args = parser.parse_args(argv)
    deadline = time.monotonic() + args.seconds
    os.set_inheritable(args.events, False)  # else the driver would wait for the processes that cases start
    with os.fdopen(args.events, "w", buffering=1) as events:

        def report(event: dict[str, Any]) -> None:
            print(json.dumps(event), file=events, flush=True)

        setting = Setting(args.device, args.toy, args.out)
        cases = {case.name: case for case in importlib.import_module(args.module).cases(setting)}
        if not run_cases(args.letter, [cases[name] for name in args.cases], args.toy, deadline, report):
            return 1
        report({"end": True})
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads and process groups of the cases may be in any state: nothing of them is torn down
