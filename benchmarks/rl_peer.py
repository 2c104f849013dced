"""GRPO here and by TRL's GRPOTrainer: the task of `make quickstart-rl`, from the same warmed-up weights, on one thread.

    python -m benchmarks.rl_peer --peer-python PATH --output DIR

PATH is a Python with torch and TRL. Both sample 64 x 8 answers a step from the whole distribution, reward exact ones,
and take one Adam step on all tokens of all answers, with the same learning rates. For each seed they run one after the
other, in alternating order. Evaluations and start-up are outside of the times. Prints one table, and draws the mean
reward of the answers of each step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.rl_layouts import prepare
from tools import quickstart_rl as quickstart

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, GROUP, LONGEST, LR, WARM_UP = 64, 8, 6, 1e-3, 30  # those of quickstart.RL_FLAGS
STEP = re.compile(r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)")
OURS, PEER = "Megatron-Patched", "TRL"
REWARD = re.compile(r"rollout before step \d+ \| reward: ([\d.e+-]+)")
LAST = 10  # steps whose rewards are averaged
Run = tuple[list[float], list[float]]  # seconds and mean reward of each step


def main() -> None:
    """Prints one row per seed, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder for logs and the picture")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    runs: dict[str, list[Run]] = {OURS: [], PEER: []}
    print("| seed | reward at first | at last, ours | at last, TRL | answers/s, ours | answers/s, TRL | ratio |")
    print(7 * "|---" + "|")
    ratios = []
    for number, seed in enumerate(args.seeds):
        prepare(seed, [], output / f"prepare_{seed}.log")
        convert(output / f"convert_{seed}.log")
        for name in (OURS, PEER)[:: 1 if number % 2 == 0 else -1]:
            log = output / f"{name}_{seed}.log"
            learned = ours(seed, args.steps, log) if name == OURS else peer(args.peer_python, seed, args.steps, log)
            runs[name].append(learned)
        rates = [PROMPTS * GROUP / statistics.median(runs[name][-1][0]) for name in (OURS, PEER)]
        first, *last = (
            f"{statistics.mean(rewards):.3f}"
            for rewards in (runs[OURS][-1][1][:LAST], *(runs[name][-1][1][-LAST:] for name in (OURS, PEER)))
        )
        ratios.append(rates[0] / rates[1])
        print(
            f"| {seed} | {first} | {' | '.join(last)} | {rates[0]:.0f} | {rates[1]:.0f} | {ratios[-1]:.2f} |",
            flush=True,
        )
    print(f"\nmedian ratio of answers per second: {statistics.median(ratios):.2f}")
    draw(runs, output / "rl_peer.png")


def convert(log: Path) -> None:
    """Writes the warmed-up weights as a Hugging Face folder."""
    formats = ["--loader", "megatron", "--saver", "hf"]
    folders = ["--load-dir", str(quickstart.WARM), "--save-dir", str(quickstart.OUT / "hf")]
    run([sys.executable, "tools/checkpoint/convert.py", *formats, *folders], log)


def ours(seed: int, steps: int, log: Path) -> Run:
    """Learns from rewards here."""
    command = [*quickstart.learning(seed), "--log-interval", "1", "--train-iters", str(steps)]
    text = run(command, log)
    return [float(ms) / 1000 for _, ms in STEP.findall(text)], [float(reward) for reward in REWARD.findall(text)]


def peer(python: str, seed: int, steps: int, log: Path) -> Run:
    """Learns from rewards by TRL."""
    flags = {
        "model": quickstart.OUT / "hf",
        "task": quickstart.TASK,
        "output": quickstart.OUT / "peer",
        "seed": seed,
        "steps": steps,
        "prompts": PROMPTS,
        "group": GROUP,
        "longest": LONGEST,
        "lr": LR,
        "warmup": WARM_UP,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    figures = json.loads(run([python, "-m", "benchmarks.rl_peer_trl", *words], log).splitlines()[-1])
    return figures["seconds"], figures["rewards"]


def run(command: list[str], log: Path) -> str:
    """Returns the output of a command with one thread, and writes it to a file."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with log.open("w") as file, log.with_suffix(".err").open("w") as errors:
        subprocess.run(command, check=True, stdout=file, stderr=errors, env=environment)
    return log.read_text()


def draw(runs: dict[str, list[Run]], path: Path) -> None:
    """Draws each seed pale and the median of the seeds."""
    from matplotlib.figure import Figure  # noqa: PLC0415  the table needs no picture

    figure = Figure(figsize=(10, 5.625), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for (name, of_seeds), color in zip(runs.items(), ("#2a6fbb", "#d1495b")):
        for _, rewards in of_seeds:
            axes.plot(rewards, color=color, alpha=0.25, linewidth=1)
        medians = [statistics.median(column) for column in zip(*(rewards for _, rewards in of_seeds), strict=True)]
        axes.plot(medians, color=color, linewidth=2.2, label=f"{name}, median of {len(of_seeds)} seeds")
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("mean reward of the answers of a step")
    axes.legend(loc="lower right")
    axes.grid(color="#e6e6e6")
    figure.savefig(path)


if __name__ == "__main__":
    main()
