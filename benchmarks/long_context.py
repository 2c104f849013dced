"""Finds the longest sequence of Llama-3.1 8B, in bf16, for which `tools/plan.py search` has a layout.

One sequence is in the batch, and the search leaves 5 % of each device's memory free. Prints a row per number of devices
and set of flags, with the command of the layout, which `pretrain_gpt.py --dry-run --world-size N` traces.

python -m benchmarks.long_context [devices ...]
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from typing import Any

CHUNKS = "--mlp-chunk-size 2048"
BF16_GRADIENTS = "--use-precision-aware-optimizer --main-grads-dtype bf16"
WEIGHTS = "--cpu-offloading-weights --cpu-offloading-num-layers 32"
# Devices -> (the lengths are multiples of, the longest one that is tried, further flags).
ROWS: dict[int, tuple[int, int, tuple[str, ...]]] = {
    1: (32_768, 786_432, ("", CHUNKS, f"{CHUNKS} {WEIGHTS}", f"{CHUNKS} {WEIGHTS} {BF16_GRADIENTS}")),
    8: (524_288, 8_388_608, ("", CHUNKS, f"{CHUNKS} {BF16_GRADIENTS}")),
    32: (1_048_576, 16_777_216, ("", CHUNKS, f"{CHUNKS} {BF16_GRADIENTS}")),
}


def search(devices: int, length: int, flags: str) -> dict[str, Any] | None:
    """Returns the first layout for a sequence of this length, or None where none fits."""
    command = (
        f"tools/plan.py search --cluster h100:{-(-devices // 8)}x{min(devices, 8)} --preset llama3.1-8b --bf16 "
        f"--seq-length {length} --max-position-embeddings {length} --global-batch-size 1 --recompute-granularity full "
        f"--recompute-method uniform --recompute-num-layers 1 --top 1 --json - {flags}"
    )
    done = subprocess.run([sys.executable, *shlex.split(command)], capture_output=True, text=True)
    if not done.stdout.startswith("{"):
        return None
    layouts = json.loads(done.stdout)["layouts"]
    return layouts[0] if layouts else None


def longest(devices: int, unit: int, most: int, flags: str) -> tuple[int, dict[str, Any] | None]:
    """Returns the longest multiple of `unit` up to `most` that has a layout, by bisection, and the layout."""
    low, high, best = 0, most // unit, None
    while low < high:
        middle = (low + high + 1) // 2
        layout = search(devices, middle * unit, flags)
        if layout is None:
            high = middle - 1
        else:
            low, best = middle, layout
    return low * unit, best


def main() -> None:
    """Prints a row per number of devices and set of flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("devices", nargs="*", type=int, choices=sorted(ROWS), help="default all")
    for devices in parser.parse_args().devices or ROWS:
        unit, most, sets = ROWS[devices]
        for flags in sets:
            length, layout = longest(devices, unit, most, flags)
            if layout is None:
                print(f"{devices} x H100, {flags or 'no chunks'}: none of at least {unit:,} tokens fits", flush=True)
                continue
            memory, host, step = (layout[key] for key in ("peak_memory_gib", "host_memory_gib", "step_seconds"))
            print(
                f"{devices} x H100, {flags or 'no chunks'}: {length:,} tokens, {memory:.1f} GiB, on the host {host:.1f} "
                f"GiB, a step of {step:,.0f} s: {layout['words']}\n{layout['command']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
