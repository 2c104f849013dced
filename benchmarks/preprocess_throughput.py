"""Throughput of tools/preprocess_data.py's pipeline compared with the tokenizer library alone, in MB/s.

The corpus is the source code of Python's standard library, one document per file, repeated to the requested size; the
tokenizer is a byte-level BPE trained on a part of it. The library's figure is pure encoding: texts in memory, processes
started, results discarded. The pipeline's includes all its work: starting its processes, reading, parsing JSON,
encoding, packing, sending tokens to the writer, writing and syncing. Rounds alternate between the two; medians are
shown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron.core.datasets.preprocess import PreprocessOptions, preprocess
from megatron.core.datasets.tokenizer_bpe import GPT2BPETokenizer

BATCH_BYTES = 1 << 19  # text per call of the library, equal to a block of the pipeline


def main() -> None:
    """Builds the corpus and the tokenizer, times both, prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=32, help="size of the JSON lines (default 32)")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, len(os.sched_getaffinity(0))])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    texts = list(read_corpus(args.megabytes * 1_000_000))
    with tempfile.TemporaryDirectory() as folder:
        jsonl = Path(folder, "corpus.jsonl")
        jsonl.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        tokenizer = train_tokenizer(texts[:400], args.vocab_size, Path(folder))
        size = sum(len(text.encode()) for text in texts) / 1e6
        print(f"{len(texts)} documents, {size:.1f} MB of text, vocabulary {tokenizer.vocab_size}, {args.rounds} rounds")
        print(f"{'workers':>7}  {'library MB/s':>12}  {'pipeline MB/s':>13}  {'ratio':>6}  pipeline range")
        for workers in dict.fromkeys(args.workers):
            alone, whole = [], []
            for _ in range(args.rounds):
                alone.append(size / time_library(texts, tokenizer, workers))
                whole.append(size / time_pipeline(jsonl, tokenizer, workers))
            library, pipeline = statistics.median(alone), statistics.median(whole)
            spread = f"{min(whole):.2f} to {max(whole):.2f}"
            print(f"{workers:>7}  {library:>12.2f}  {pipeline:>13.2f}  {pipeline / library:>6.2f}  {spread}")


def read_corpus(size: int) -> Iterator[str]:
    """Yields Python's own sources, one document per file, repeatedly until `size` bytes."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    for path in itertools.cycle(path for path in paths if "site-packages" not in path.parts):
        text = path.read_bytes().decode("utf-8", errors="ignore")
        size -= len(text)
        yield text
        if size <= 0:
            return


def train_tokenizer(texts: Sequence[str], vocab_size: int, folder: Path) -> GPT2BPETokenizer:
    """Trains a byte-level BPE in GPT-2's two files."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.model.save(str(folder))
    return GPT2BPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))


def time_library(texts: Sequence[str], tokenizer: GPT2BPETokenizer, workers: int) -> float:
    """Returns the seconds from the start signal until the last process has encoded its batches."""
    batches = cut_batches(texts)
    pipes, processes = [], []
    for number in range(workers):
        here, there = multiprocessing.Pipe()
        process = multiprocessing.Process(target=encode_batches, args=(tokenizer, batches[number::workers], there))
        process.start()
        pipes.append(here)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    start = time.perf_counter()
    for pipe in pipes:
        pipe.send("start")
    for pipe in pipes:
        pipe.recv()
    seconds = time.perf_counter() - start
    for process in processes:
        process.join()
    return seconds


def cut_batches(texts: Sequence[str]) -> list[list[str]]:
    """Divides texts into batches of about BATCH_BYTES."""
    batches: list[list[str]] = [[]]
    size = 0
    for text in texts:
        if size >= BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(text)
        size += len(text)
    return batches


def encode_batches(tokenizer: GPT2BPETokenizer, batches: Sequence[Sequence[str]], pipe: Connection) -> None:
    """Encodes batches in a separate process with one thread and discards the results."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer.encode_batch(["ready"])
    pipe.send("ready")
    pipe.recv()
    for batch in batches:
        tokenizer.encode_batch(batch)
    pipe.send("done")


def time_pipeline(jsonl: Path, tokenizer: GPT2BPETokenizer, workers: int) -> float:
    """Returns the seconds of a complete call of `preprocess`."""
    start = time.perf_counter()
    preprocess(
        PreprocessOptions(
            input=(str(jsonl),), output_prefix=str(jsonl.parent / "out"), workers=workers, append_eod=True
        ),
        tokenizer,
    )
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
