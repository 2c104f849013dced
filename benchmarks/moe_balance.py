"""How evenly the experts of a small model are used under each way to balance them, on text.

Trains the same model (16 experts, 4 per token) on the sources of Python's standard library, as bytes, once per way: without
any balance, by a bias, and by each kind of balance loss. Prints one table and draws the largest load of an expert divided by
the mean, of the worst layer, over the steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron.command_line.read import parse
from megatron.core.datasets.indexed import IndexedDatasetWriter
from megatron.training.process import start_process
from megatron.training.setup import build

SIGMOID = "--moe-router-score-function sigmoid"
WAYS = {
    "none": "--moe-router-load-balancing-type none",
    "bias": f"{SIGMOID} --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01",
    "aux_loss": "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
    "seq_aux_loss": "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01",
    "global_aux_loss": "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01",
}
MODEL = """
    --device cpu --num-layers 4 --hidden-size 64 --num-attention-heads 4 --swiglu --disable-bias-linear
    --normalization RMSNorm --position-embedding-type rope --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 64
    --attention-dropout 0 --hidden-dropout 0 --vocab-size 257 --tokenizer-type NullTokenizer --seq-length 128
    --micro-batch-size 16 --global-batch-size 16 --lr 2e-3 --lr-decay-style constant --lr-warmup-iters 10
    --eval-iters 4 --eval-interval 100000 --num-workers 0 --split 95,5,0
"""


def main() -> int:
    """Prints the table and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--last", type=int, default=50, help="steps over which the table averages")
    parser.add_argument("--picture", type=Path, default=Path("moe_balance.png"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "stdlib"
        write_bytes(prefix)
        runs = {name: train(f"{MODEL} {flags} --data-path {prefix}", args.steps) for name, flags in WAYS.items()}
    print(f"load max/mean per layer, mean over the last {args.last} of {args.steps} steps")
    print("| balance | layer 0 | layer 1 | layer 2 | layer 3 | worst | validation loss |")
    print("|---|---|---|---|---|---|---|")
    for name, (loads, loss) in runs.items():
        means = [statistics.mean(load[layer] for load in loads[-args.last :]) for layer in range(4)]
        cells = " | ".join(f"{mean:.2f}" for mean in means)
        print(f"| {name} | {cells} | {max(means):.2f} | {loss:.4f} |")
    draw(args.picture, {name: [max(load) for load in loads] for name, (loads, _) in runs.items()})
    return 0


def write_bytes(prefix: Path) -> None:
    """The sources of the standard library's top level as a dataset; 256 ends a document."""
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            writer.add_document([*path.read_bytes(), 256])
        writer.finalize()


def train(flags: str, steps: int) -> tuple[list[tuple[float, ...]], float]:
    """(load max/mean of each layer after each step, validation loss)"""
    run = parse(f"{flags} --train-iters {steps}".split(), description="")
    groups, device = start_process(run.parallel, 0, 1, 0, 1)
    trainer = build(run, groups, device)
    loads = []
    for _ in range(steps):
        report = trainer.train_step().experts
        assert report is not None
        loads.append(report.imbalance)
    assert trainer.readers.valid is not None
    return loads, trainer.evaluate(trainer.readers.valid)


def draw(path: Path, curves: dict[str, list[float]]) -> None:
    """Moving averages over 10 steps."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, values in curves.items():
        smooth = [statistics.mean(values[max(0, at - 9) : at + 1]) for at in range(len(values))]
        axes.plot(range(1, len(values) + 1), smooth, label=name)
    axes.axhline(1.3, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel("step")
    axes.set_ylabel("load max/mean of the worst layer")
    axes.set_ylim(1.0, None)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
