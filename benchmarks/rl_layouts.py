"""The run of `make quickstart-rl` in several layouts with `--batch-invariant-mode`: do sampler and trainer agree?

    python -m benchmarks.rl_layouts --output DIR

Prints one row per layout: the largest difference of log-probabilities between sampler and trainer in any step, the
largest k3, whether the answers of the first step are those of one process, and the share of exact answers before and
after. The experts are those of a second warmed-up model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools import quickstart_rl as quickstart

ROOT = Path(__file__).resolve().parents[1]
EXPERTS = ["--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "128"]
# name -> processes, flags of the layout, flags of the model. The first layout of a model is compared with.
LAYOUTS: dict[str, tuple[int, list[str], list[str]]] = {
    "one process": (1, [], []),
    "tp 2": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"], []),
    "dp 2": (2, [], []),
    "pp 2": (2, ["--pipeline-model-parallel-size", "2"], []),
    "experts, one process": (1, [], EXPERTS),
    "experts, ep 2": (2, ["--expert-model-parallel-size", "2"], EXPERTS),
}
DIFFERENCE = re.compile(r"rollout before step \d+ .*largest difference: ([\d.e+-]+).* sampler-k3: ([\d.e+-]+)")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for logs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="default: all")
    args = parser.parse_args()
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    print("| layout | steps | largest difference | largest k3 | first answers | before | after |")
    print(7 * "|---" + "|")
    warmed_up, answers = None, None
    for name in args.layouts:
        processes, layout, model = LAYOUTS[name]
        if model != warmed_up:
            prepare(args.seed, model, output / "prepare.log")
            warmed_up, answers = model, None
        log = output / f"{name.replace(', ', '_').replace(' ', '_')}.log"
        learn(args.seed, args.steps, processes, [*layout, *model], log)
        differences = DIFFERENCE.findall(log.read_text())
        exact = quickstart.exact_answers(log)
        first = sorted(sampled(quickstart.ROLLOUTS, 1))
        same = "-" if answers is None else "equal" if first == answers else "different"
        answers = answers or first
        largest = [max(float(row[column]) for row in differences) for column in (0, 1)]
        shares = f"{exact[0][1]:.1f} % | {exact[-1][1]:.1f} %"
        print(f"| {name} | {len(differences)} | {largest[0]:g} | {largest[1]:g} | {same} | {shares} |", flush=True)


def prepare(seed: int, model: list[str], log: Path) -> None:
    """Writes the task and warms up the model."""
    shutil.rmtree(quickstart.OUT, ignore_errors=True)
    quickstart.LOGS.mkdir(parents=True)
    with log.open("w") as file:
        for command in (
            quickstart.task(seed),
            quickstart.preprocessing(),
            [*quickstart.warm_up(seed), *model],
        ):
            subprocess.run(command, check=True, stdout=file, stderr=subprocess.STDOUT)


def learn(seed: int, steps: int, processes: int, flags: list[str], log: Path) -> None:
    """Learns from rewards in a layout."""
    shutil.rmtree(quickstart.TRAINED, ignore_errors=True)
    shutil.rmtree(quickstart.ROLLOUTS, ignore_errors=True)
    command = quickstart.learning(seed)
    words = [*command[command.index("train_rl.py") :], "--train-iters", str(steps), "--batch-invariant-mode", *flags]
    launch = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    launcher = [*launch, "--nproc-per-node", str(processes)] if processes > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("w") as file:
        subprocess.run(
            [sys.executable, *launcher, *words], check=True, stdout=file, stderr=subprocess.STDOUT, env=environment
        )


def sampled(folder: Path, step: int) -> list[tuple[str, tuple[int, ...]]]:
    """Returns (prompt, tokens) of the answers of a step."""
    files = sorted(folder.glob("*.jsonl"))
    rows = [json.loads(line) for line in files[step - 1].read_text().splitlines()]
    return [(str(row["prompt"]), tuple(row["ids"])) for row in rows]


if __name__ == "__main__":
    main()
