"""Seconds from the loss of a process to the next step, by the checkpoint from which the job goes on.

`torchrun --max-restarts 1` trains a small model on two ranks and keeps checkpoints of one kind: those in --save, or
local ones on the disk or in the memory of the host besides them. After the same step a rank is killed. Measured are
the times until the job prints its next step, and until it has repeated the steps that were lost. Most of the former is
the start of processes, which is the same for all; "load" is what the log says of finding and loading the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.background_save import LINE
from tests.pool import free_port

ROOT = Path(__file__).parents[1]
KINDS = {
    "persistent": "",
    "local": "--non-persistent-save-interval {} --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir {}/disk",
    "memory": "--non-persistent-save-interval {}",
}
RANKS = 2
_LOADING = re.compile(r"(?:find-local|load)-checkpoint \.+: \([\d.]+, ([\d.]+)\)")
_STEP = re.compile(r"iteration\s+(\d+)/")


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-interval", type=int, default=20)
    parser.add_argument("--local-interval", type=int, default=2)
    parser.add_argument("--lost-after", type=int, default=35, help="the step after which a rank is killed")
    args = parser.parse_args()
    print(f"a checkpoint in --save every {args.save_interval} steps, a local one every {args.local_interval}\n")
    print(f"| checkpoint | from step | load s | next step s | step {args.lost_after} again s |")
    print("|---|---|---|---|---|")
    for kind, flags in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            line = flags.format(args.local_interval, folder)
            first, load, to_first, to_lost = lose_a_rank(folder, line, args.save_interval, args.lost_after)
        print(f"| {kind} | {first - 1} | {load:.2f} | {to_first:.1f} | {to_lost:.1f} |", flush=True)


def lose_a_rank(folder: str, flags: str, save_interval: int, lost_after: int) -> tuple[int, float, float, float]:
    """Runs a job and kills a rank after a step. Returns (the first step of the restarted job, the seconds for which it
    finds and loads its checkpoint, the seconds until its first step is done, and until the lost one is done again)."""
    saves = f"--save {folder}/save --load {folder}/save --save-interval {save_interval} --log-interval 1 {flags}"
    model = LINE.replace("--global-batch-size 2", f"--global-batch-size {2 * RANKS}")
    words = [*model.replace("--train-iters 100000", f"--train-iters {lost_after + 5}").split(), *saves.split()]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts", "1"]
    job = subprocess.Popen(
        [sys.executable, *torchrun, "--master-port", str(free_port()), "pretrain_gpt.py", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert job.stdout is not None
    killed_at, first, load, to_first, to_lost = 0.0, 0, 0.0, math.nan, math.nan
    for line in job.stdout:
        step, loading = _STEP.search(line), _LOADING.search(line)
        number = int(step[1]) if step else 0
        if not killed_at and number == lost_after:
            beat = json.loads((Path(folder) / "save" / "heartbeat" / "rank_00001.json").read_text())
            os.kill(beat["pid"], signal.SIGKILL)
            killed_at = time.perf_counter()
        elif killed_at and loading:
            load += float(loading[1]) / 1000
        elif killed_at and 0 < number <= lost_after:
            seconds = time.perf_counter() - killed_at
            if not first:
                first, to_first = number, seconds
            if number == lost_after:
                to_lost = seconds
    job.wait()
    return first, load, to_first, to_lost


if __name__ == "__main__":
    main()
