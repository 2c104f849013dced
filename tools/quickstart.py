"""Trains a small language model from scratch, on this machine's CPU, in a few minutes. `make quickstart` runs it.

The corpus is the source code of Python's standard library. All parts from the dataset on are commands of this project,
printed before they run. Everything is written to ./quickstart, which is emptied first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron.command_line.exits import exit_code
from megatron.command_line.flag_parser import FlagParser
from megatron.core.datasets.indexed import IndexedDataset
from megatron.tooling.parts import PartFailedError, format_command, python, run_command, run_parts
from megatron.training.logging.line import parse_evaluation, parse_line
from megatron.training.logging.loss_curve import Point, draw_loss_curve

ROOT = Path(__file__).resolve().parents[1]
# Relative to ROOT, where every command runs, so that printed commands can be copied.
OUT = Path("quickstart")
CORPUS, TOKENIZER, DATASET = OUT / "corpus.jsonl", OUT / "tokenizer", OUT / "data" / "stdlib"
CHECKPOINTS, LOGS, CURVE = OUT / "checkpoints", OUT / "logs", OUT / "loss.png"
EXPERT_CHECKPOINTS = OUT / "checkpoints_moe"

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 4096
ITERATIONS, FIRST_LEG = 300, 200
PROMPT = "def read_file(path):"

TOKENIZER_FLAGS = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {TOKENIZER}"
TRAIN_FLAGS = f"""
    --device cpu --data-path {DATASET}_text_document --split 95,5,0 --num-workers 0 {TOKENIZER_FLAGS}
    --seq-length 128 --global-batch-size 4
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 20 --adam-beta2 0.98 --weight-decay 0.1
    --eval-interval 100 --eval-iters 16 --log-interval 10 --save-interval 100
"""
DENSE = f"--preset llama-tiny --save {CHECKPOINTS}"
EXPERTS = f"--preset moe-tiny --save {EXPERT_CHECKPOINTS} --moe-aux-loss-coeff 0.01 --expert-model-parallel-size 2"
TENSOR_PARALLEL = "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 4"
DATA_PARALLEL = "--tensor-model-parallel-size 1 --micro-batch-size 2"


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, 1 if a part failed, 2 for a word on the command line, which takes none."""
    parser = FlagParser(description=__doc__, allow_abbrev=False)
    return exit_code(lambda: run(parser.parse_args(argv)))


def run(_: argparse.Namespace) -> int:
    """Runs the parts in order; returns 0, or 1 at the first failure."""
    os.chdir(ROOT)
    shutil.rmtree(OUT, ignore_errors=True)
    LOGS.mkdir(parents=True)
    parts: dict[str, Callable[[], None]] = {
        "Collect the corpus": collect_corpus,
        "Train a tokenizer": train_tokenizer,
        "Tokenize the corpus with 2 workers": preprocess,
        "Pre-train with tensor parallelism 2 and sequence parallelism": pretrain,
        "Continue the checkpoint with data parallelism 2": resume,
        "Generate code": generate,
        "Draw the loss curve": draw,
    }
    seconds = run_parts("quickstart", parts)
    if seconds is None:
        return 1
    print(f"\n=== Done in {sum(seconds.values()):.0f} s\n\n{summary(seconds)}")
    return 0


def collect_corpus() -> None:
    """Writes the running interpreter's standard library as one JSON line per file."""
    texts = read_sources(Path(sysconfig.get_path("stdlib")))
    with open(CORPUS, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    print(f"{len(texts)} files of Python's standard library, {CORPUS.stat().st_size / 1e6:.1f} MB, in {CORPUS}")


def read_sources(folder: Path) -> list[str]:
    """Returns the texts of all .py files below `folder` except installed packages, in a fixed shuffled order.

    --split takes the held-out documents from the end: in the order of their names they would be a few packages.
    """
    paths = [p for p in folder.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts)]
    texts = [path.read_bytes().decode("utf-8", errors="ignore") for path in sorted(paths)]
    random.Random(1234).shuffle(texts)
    return [text for text in texts if text.strip()]


def train_tokenizer() -> None:
    """Trains a byte-level BPE on every fourth document and saves it as a Hugging Face folder."""
    with open(CORPUS, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for number, line in enumerate(file) if number % 4 == 0]
    save_tokenizer(texts, VOCABULARY, TOKENIZER)
    print(f"{VOCABULARY} tokens, learnt from {len(texts)} files, in {TOKENIZER}")


def save_tokenizer(texts: Sequence[str], vocabulary: int, folder: Path) -> None:
    """Trains on `texts` and writes files for AutoTokenizer; END_OF_TEXT is its eos token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT).save_pretrained(folder)


def preprocess() -> None:
    """Converts JSON lines to .bin/.idx."""
    flags = f"--input {CORPUS} --output-prefix {DATASET} --workers 2 --append-eod {TOKENIZER_FLAGS}"
    run_command([python(ROOT), "tools/preprocess_data.py", *flags.split()], LOGS / "preprocess.log")


def pretrain() -> None:
    """Runs the first part: one replica, its layers sharded over two ranks. --exit-interval ends it early."""
    flags = f"{TENSOR_PARALLEL} --exit-interval {FIRST_LEG}"
    run_command(training(f"{DENSE} {flags}", ITERATIONS), LOGS / "pretrain_tp2.log")


def resume() -> None:
    """Runs the second part: the same run from its checkpoint, now with two replicas."""
    run_command(training(f"{DENSE} {DATA_PARALLEL} --load {CHECKPOINTS}", ITERATIONS), LOGS / "resume_dp2.log")


def training(flags: str, iterations: int) -> list[str]:
    """Returns the command that trains on two processes to `iterations`, with the model and the layout of `flags`."""
    return [*torchrun(), "pretrain_gpt.py", *TRAIN_FLAGS.split(), "--train-iters", str(iterations), *flags.split()]


def generate() -> None:
    """Continues PROMPT with the last checkpoint."""
    run_command(generation(PROMPT), LOGS / "generate.log")


def generation(prompt: str) -> list[str]:
    """Returns the command that continues `prompt`."""
    flags = f"--load {CHECKPOINTS} --max-new-tokens 64 --temperature 0.8 --top-p 0.95"
    return [python(ROOT), "tools/generate.py", *flags.split(), "--prompt", prompt]


def draw() -> None:
    """Draws the losses of both parts from their log lines."""
    train, validation = read_losses([LOGS / "pretrain_tp2.log", LOGS / "resume_dp2.log"])
    entropy = unigram_entropy(IndexedDataset(f"{DATASET}_text_document"))
    title = f"LLaMA on Python's sources: TP 2 to iteration {FIRST_LEG}, then DP 2"
    draw_loss_curve(CURVE, train, validation, ("unigram entropy", entropy), title)
    print(f"{len(train)} training and {len(validation)} validation losses in {CURVE}")
    if validation[-1][1] >= entropy:
        raise PartFailedError(f"validation loss {validation[-1][1]:.3f} is not below the unigram entropy {entropy:.3f}")


def read_losses(logs: Sequence[Path]) -> tuple[list[Point], list[Point]]:
    """Returns (training, validation) losses by iteration, from the lines that runs print."""
    lines = [line for log in logs for line in log.read_text(encoding="utf-8").splitlines()]
    train = [fields for line in lines if "lm loss" in (fields := parse_line(line))]
    validation = [fields for line in lines if "iteration" in (fields := parse_evaluation(line))]
    validation = [fields for fields in validation if "test set" not in str(fields["where"])]
    train_points, validation_points = (
        [(int(fields["iteration"]), float(fields["lm loss"])) for fields in series] for series in (train, validation)
    )
    return train_points, validation_points


def unigram_entropy(dataset: IndexedDataset) -> float:
    """Returns the entropy of the tokens' frequencies in nats: the loss of a model that knows only these frequencies."""
    counts = np.zeros(0, np.int64)
    for sequence in range(len(dataset)):
        totals = np.bincount(dataset.get(sequence), minlength=len(counts))
        totals[: len(counts)] += counts
        counts = totals
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def summary(seconds: Mapping[str, float]) -> str:
    """Returns a summary: the files, the losses, the times, and commands to try next."""
    train, validation = read_losses([LOGS / "pretrain_tp2.log", LOGS / "resume_dp2.log"])
    dataset = IndexedDataset(f"{DATASET}_text_document")
    tokens = int(np.sum(dataset.sequence_lengths, dtype=np.int64))
    parameters = re.search(r"number of parameters on .*: (\d+)", (LOGS / "resume_dp2.log").read_text(encoding="utf-8"))
    assert parameters, "the log of a run says how many parameters it trains"
    files = {
        CORPUS: f"{len(dataset)} documents, {CORPUS.stat().st_size / 1e6:.1f} MB",
        TOKENIZER: f"byte-level BPE, {VOCABULARY} tokens",
        DATASET.parent: f"{tokens:,} tokens, the last 5 % of the documents held out",
        CHECKPOINTS: f"LLaMA of {int(parameters[1]) / 1e6:.1f}M parameters",
        CURVE: "loss of both legs",
        LOGS: "what each part printed",
    }
    losses = {
        "unigram entropy of the corpus": unigram_entropy(dataset),
        f"training loss at iteration {train[-1][0]}": train[-1][1],
        **{f"validation loss at iteration {iteration}": loss for iteration, loss in validation},
    }
    lines = [f"  {path!s:26} {what}" for path, what in files.items()]
    lines += ["", "  nats per token"] + [f"    {name:34} {value:6.3f}" for name, value in losses.items()]
    lines += ["", "  seconds"] + [f"    {title:62} {value:4.0f}" for title, value in seconds.items()]
    return "\n".join([*lines, "", "Try next:", "", *try_next()])


def try_next() -> list[str]:
    """Returns commands to try with the results, each below a line that explains it."""
    longer = training(f"{DENSE} {DATA_PARALLEL} --load {CHECKPOINTS} --override-opt-param-scheduler", 2 * ITERATIONS)
    commands = {
        "Another prompt": generation("class Queue:"),
        f"Train on to iteration {2 * ITERATIONS}, with the learning-rate schedule of a run of that length": longer,
        "A model with 8 experts, 4 on each process": training(f"{EXPERTS} {DATA_PARALLEL}", ITERATIONS),
        "All tests": ["make", "test"],
    }
    return [f"# {what}\n{format_command(command)}\n" for what, command in commands.items()]


def torchrun() -> list[str]:
    """Returns the launcher of this interpreter's environment, for two processes that share the cores."""
    # torchrun by default gives each process one thread; the matrices are too small for more than four.
    threads = min(4, max(1, (os.cpu_count() or 2) // 2))
    launcher = str(Path(python(ROOT)).with_name("torchrun"))
    return ["env", f"OMP_NUM_THREADS={threads}", launcher, "--standalone", "--nproc-per-node", "2"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
