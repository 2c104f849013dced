"""How evenly the experts of a small model are used under each way to balance them, on text.

Trains the same model (16 experts, 4 per token) on English text, once per way: without any balance, by a bias, and by
each kind of balance loss. The text is on every machine: the documentation strings of Python's standard library and the
topics of its help, as byte pairs. Prints one table, of the load summed over the last steps, and draws the largest load
of an expert in a step divided by the mean, of the worst layer.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import tokenizers
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from megatron.command_line.read import parse
from megatron.core.datasets.indexed import IndexedDatasetWriter
from megatron.core.transformer.moe.router import Router
from megatron.training.process import start_process
from megatron.training.setup import build

VOCABULARY = 1024  # byte pairs
SHORT = 200  # characters; documentation strings up to this length are left out
SIGMOID, SOFTMAX = "--moe-router-score-function sigmoid", "--moe-router-pre-softmax"
WAYS = {
    "none": f"{SOFTMAX} --moe-router-load-balancing-type none",
    "bias": f"{SIGMOID} --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01",
}
for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
    WAYS[kind] = f"{SOFTMAX} --moe-router-load-balancing-type {kind} --moe-aux-loss-coeff 0.01"
MODEL = f"""
    --device cpu --num-layers 4 --hidden-size 64 --num-attention-heads 4 --swiglu --disable-bias-linear
    --normalization RMSNorm --position-embedding-type rope --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 64
    --attention-dropout 0 --hidden-dropout 0 --vocab-size {VOCABULARY + 1} --tokenizer-type NullTokenizer --seq-length 128
    --micro-batch-size 16 --global-batch-size 16 --lr 1e-3 --lr-decay-style constant --lr-warmup-iters 10
    --eval-iters 4 --eval-interval 100000 --num-workers 0 --split 95,5,0
"""


def main() -> int:
    """Prints the table and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--last", type=int, default=100, help="steps of the table")
    parser.add_argument("--picture", type=Path, default=Path("moe_balance.png"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "stdlib"
        write_text(prefix)
        runs = {name: train(f"{MODEL} {flags} --data-path {prefix}", args.steps) for name, flags in WAYS.items()}
    print(
        f"load max/mean per layer, of the last {args.last} of {args.steps} steps together; one step: the mean over them"
    )
    print("| balance | layer 0 | layer 1 | layer 2 | layer 3 | worst | worst of one step | validation loss |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (loads, loss) in runs.items():
        together = imbalance(loads[-args.last :].sum(0))
        single = max(imbalance(loads[-args.last :]).mean(0).tolist())
        cells = " | ".join(f"{each:.2f}" for each in together.tolist())
        print(f"| {name} | {cells} | {max(together.tolist()):.2f} | {single:.2f} | {loss:.4f} |")
    draw(args.picture, {name: imbalance(loads).amax(1).tolist() for name, (loads, _) in runs.items()})
    return 0


def write_text(prefix: Path) -> None:
    """The text as a dataset of byte pairs; the last token of the vocabulary ends a document."""
    documents = [*topics.values(), *documentation()]
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(documents, vocab_size=VOCABULARY, show_progress=False)
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for document in documents:
            writer.add_document([*tokenizer.encode(document).ids, VOCABULARY])
        writer.finalize()


def documentation() -> Iterator[str]:
    """The longer documentation strings of Python's standard library."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > SHORT:
                    yield text


def imbalance(loads: Tensor) -> Tensor:
    """[..., experts] -> the largest divided by the mean [...]."""
    return loads.amax(-1) / loads.double().mean(-1)


def train(flags: str, steps: int) -> tuple[Tensor, float]:
    """(load of every expert [steps, layers, experts], validation loss)"""
    run = parse(f"{flags} --train-iters {steps}".split(), description="")
    groups, device = start_process(run.parallel, 0, 1, 0, 1)
    trainer = build(run, groups, device)
    loads, routers = [], [module for module in trainer.model.modules() if isinstance(module, Router)]
    for _ in range(steps):
        trainer.train_step()
        loads.append(torch.stack([router.previous_load.clone() for router in routers]))
    assert trainer.readers.valid is not None
    return torch.stack(loads), trainer.evaluate(trainer.readers.valid)


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
