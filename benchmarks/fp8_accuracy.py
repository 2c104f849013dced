"""How close training with FP8 products stays to training in bf16: the same small model on the same text, once per
recipe.

Prints one table: the training loss over the last steps, the validation loss, and their distances from bf16. Other
orders of sums, which change nothing but the rounding of bf16, show the distance that means nothing. FP8 products are
emulated on a CPU: the numbers are those of a GPU up to the order and the precision of sums, and the time says nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.moe_balance import VOCABULARY, write_text
from megatron.command_line.read import parse
from megatron.config.rules.check import check
from megatron.training.process import start_process
from megatron.training.setup import build

HYBRID = "--fp8-format hybrid --fp8-recipe"
HISTORY = "--fp8-amax-history-len 16 --fp8-amax-compute-algo max"
WAYS = {
    "bf16": "",
    "bf16, other sums": "--micro-batch-size 8",
    "blockwise, hybrid": f"{HYBRID} blockwise",
    "blockwise, e4m3": "--fp8-format e4m3 --fp8-recipe blockwise",
    "delayed, last step": f"{HYBRID} delayed",
    "delayed, max of 16 steps": f"{HYBRID} delayed {HISTORY}",
    "tensorwise": f"{HYBRID} tensorwise",
    "mxfp8": f"{HYBRID} mxfp8",
}
MODEL = f"""
    --device cpu --bf16 --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --swiglu
    --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --vocab-size {VOCABULARY + 1} --tokenizer-type NullTokenizer --seq-length 64 --micro-batch-size 16
    --global-batch-size 16 --lr 2e-3 --lr-decay-style constant --lr-warmup-iters 10 --eval-iters 8 --eval-interval 100000
    --num-workers 0 --split 95,5,0
"""


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--last", type=int, default=20, help="steps whose mean training loss is printed")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS), metavar="WAY")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "stdlib"
        write_text(prefix)
        print(f"mean loss of the last {args.last} of {args.steps} steps, and validation loss behind them")
        print("| products | training loss | from bf16 | validation loss | from bf16 |")
        print("|---|---|---|---|---|")
        expected = train("bf16", prefix, args.steps, args.last)
        for name in ("bf16", *(each for each in args.ways if each != "bf16")):
            found = expected if name == "bf16" else train(name, prefix, args.steps, args.last)
            cells = (f"{loss:.4f} | {100 * (loss / other - 1):+.2f} %" for loss, other in zip(found, expected))
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


def train(name: str, prefix: Path, steps: int, last: int) -> tuple[float, float]:
    """(mean training loss of the last steps, validation loss)"""
    run = parse(f"{MODEL} {WAYS[name]} --data-path {prefix} --train-iters {steps}".split(), description="")
    check(run, 1)
    groups, device = start_process(run.parallel, 0, 1, 0, 1)
    trainer = build(run, groups, device)
    losses = [trainer.train_step().loss for _ in range(steps)]
    assert trainer.readers.valid is not None
    return statistics.mean(losses[-last:]), trainer.evaluate(trainer.readers.valid)


if __name__ == "__main__":
    sys.exit(main())
