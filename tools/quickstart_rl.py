"""Teaches a tiny model by rewards, on this machine's CPU, in a few minutes. `make quickstart-rl` runs it.

The task is to write three digits in reverse. The model is warmed up on answered questions until it gets some of them
right, and then learns from rewards alone. The questions of the evaluation are kept out of both. Every command is
printed before it runs. Everything is written to ./quickstart_rl, which is emptied first.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.command_line.exits import exit_code
from megatron.command_line.flag_parser import FlagParser
from megatron.tooling.parts import PartFailedError, format_command, python, run_command, run_parts
from megatron.training.logging.loss_curve import Point, draw_curve

ROOT = Path(__file__).resolve().parents[1]
OUT = Path("quickstart_rl")  # relative to ROOT, where every command runs, so that printed commands can be copied
TASK, DATASET, LOGS, CURVE = OUT / "task", OUT / "data" / "warm_up", OUT / "logs", OUT / "exact.png"
WARM, TRAINED, ROLLOUTS = OUT / "warm_up", OUT / "checkpoints", OUT / "rollouts"
WARM_UP_STEPS, STEPS = 45, 100

TOKENIZER_FLAGS = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {TASK / 'tokenizer'}"
MODEL_FLAGS = f"""
    --device cpu --preset llama-tiny --num-layers 2 --hidden-size 64 --ffn-hidden-size 256 --num-attention-heads 4
    {TOKENIZER_FLAGS} --make-vocab-size-divisible-by 8 --num-workers 0 --weight-decay 0 --adam-beta2 0.98
    --attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --lr-decay-style constant
"""
WARM_UP_FLAGS = f"""
    --data-path {DATASET} --seq-length 64 --micro-batch-size 8 --global-batch-size 8 --train-iters {WARM_UP_STEPS}
    --eval-iters 0 --log-interval 20 --save {WARM} --save-interval {WARM_UP_STEPS}
"""
RL_FLAGS = f"""
    --pretrained-checkpoint {WARM} --prompt-data {TASK / "prompts.jsonl"} --eval-prompt-data {TASK / "held_out.jsonl"}
    --rm-type exact --rm-workers 1 --eval-interval 10 --log-interval 20 --train-iters {STEPS} --lr-warmup-iters 30
    --seq-length 128 --micro-batch-size 8 --rollout-max-response-len 6 --grpo-prompts-per-step 64 --grpo-group-size 8
    --save {TRAINED} --save-interval {STEPS} --save-rollouts {ROLLOUTS}
"""
EXACT = re.compile(r"evaluation at iteration (\d+) \|.* exact: ([\d.e+-]+)")


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, 1 if a part failed, 2 for a mistake on the command line."""
    parser = FlagParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=1, help="of the task, of the weights and of sampling; default 1")
    return exit_code(lambda: run(parser.parse_args(argv)))


def run(args: argparse.Namespace) -> int:
    """Runs the parts in order; returns 0, or 1 at the first failure."""
    os.chdir(ROOT)
    shutil.rmtree(OUT, ignore_errors=True)
    LOGS.mkdir(parents=True)
    commands = {
        "Write questions, answers and a tokenizer": ("task", task(args.seed)),
        "Tokenize the answered questions": ("preprocess", preprocessing()),
        "Warm up on answered questions": ("warm_up", warm_up(args.seed)),
        "Learn from rewards": ("rewards", learning(args.seed)),
    }
    parts: dict[str, Callable[[], None]] = {
        title: (lambda name=name, command=command: run_command(command, LOGS / f"{name}.log"))  # type: ignore[misc]
        for title, (name, command) in commands.items()
    }
    seconds = run_parts("quickstart-rl", parts | {"Draw the curve": draw})
    if seconds is None:
        return 1
    before, *_, after = exact_answers(LOGS / "rewards.log")
    print(f"\n=== Done in {sum(seconds.values()):.0f} s\n")
    print(f"exact answers: before {before[1]:.1f} %, after {after[1]:.1f} %\n")
    print(f"  {CURVE!s:26} exact answers over optimizer steps")
    print(f"  {ROLLOUTS / 'index.html'!s:26} all answers with their rewards, step by step")
    print(f"  {TRAINED!s:26} the trained model\n\nTry next:\n\n# Ask it")
    print(format_command(question("2 0 9 =")))
    return 0


def task(seed: int) -> list[str]:
    """Returns the command that writes the data of the task."""
    return [python(ROOT), "examples/rl/reversed_digits.py", "--output", str(TASK), "--seed", str(seed)]


def preprocessing() -> list[str]:
    """Returns the command that tokenizes the conversations of the warm-up."""
    flags = f"--input {TASK / 'warm_up.jsonl'} --output-prefix {DATASET} --workers 1 --seq-length 64 {TOKENIZER_FLAGS}"
    return [python(ROOT), "tools/preprocess_sft.py", *flags.split()]


def warm_up(seed: int) -> list[str]:
    """Returns the command that trains on answered questions."""
    return [*single_thread(), "finetune.py", *MODEL_FLAGS.split(), *WARM_UP_FLAGS.split(), "--seed", str(seed)]


def learning(seed: int) -> list[str]:
    """Returns the command that learns from rewards."""
    return [*single_thread(), "train_rl.py", *MODEL_FLAGS.split(), *RL_FLAGS.split(), "--seed", str(seed)]


def question(prompt: str) -> list[str]:
    """Returns the command that asks the trained model."""
    return [python(ROOT), "tools/generate.py", "--load", str(TRAINED), "--temperature", "0", "--prompt", prompt]


def single_thread() -> list[str]:
    """Returns this interpreter with one thread: the matrices are too small for more."""
    return ["env", "OMP_NUM_THREADS=1", python(ROOT)]


def draw() -> None:
    """Draws the share of exact answers from the log of the run. Raises PartFailedError if it has not risen."""
    points = exact_answers(LOGS / "rewards.log")
    draw_curve(CURVE, points, "optimizer steps", "exact answers to held-out questions, %", "Learning from rewards")
    print(f"{len(points)} evaluations in {CURVE}")
    if points[-1][1] <= points[0][1]:
        raise PartFailedError(f"exact answers have not risen: {points[0][1]:.1f} % before, {points[-1][1]:.1f} % after")


def exact_answers(log: Path) -> list[Point]:
    """Returns (optimizer steps, exact answers in percent) of each evaluation."""
    found = EXACT.findall(log.read_text(encoding="utf-8"))
    return [(int(iteration), 100 * float(share)) for iteration, share in found]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
