"""Conversion of a model between Hugging Face format and this program's: speed compared with copying, and memory.

Writes a random bf16 model of a given size, then times alternately: a copy of its files, Hugging Face -> checkpoint,
checkpoint -> Hugging Face. All of them write to the same disk and sync. Memory is the largest resident size of the
converting process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.tensor_file import TensorSource, write_tensor_file
from megatron.core.models.hf.families import FAMILIES, parse_config
from megatron.core.models.hf.names import table

TOOL = Path(__file__).parents[1] / "tools" / "checkpoint" / "convert.py"
SHARD_BYTES = 2 * 10**9
# Llama-3.2-3B's shape, untied.
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def main() -> int:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24, help="24 make a model of 3.2 billion parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None, help="on the disk to measure; needs four times the model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        root = Path(name)
        nbytes = write_model(root / "model", args.layers)
        seconds: dict[str, list[float]] = {"copy": [], "hf -> megatron": [], "megatron -> hf": []}
        memory: dict[str, int] = {}
        for _ in range(args.rounds):
            seconds["copy"].append(copy(root / "model", root / "copy"))
            for title, loader, saver, source, target in (
                ("hf -> megatron", "hf", "megatron", "model", "ours"),
                ("megatron -> hf", "megatron", "hf", "ours", "back"),
            ):
                words = ["--loader", loader, "--saver", saver]
                words += ["--load-dir", str(root / source), "--save-dir", str(root / target)]
                taken, peak = convert(words)
                seconds[title].append(taken)
                memory[title] = max(memory.get(title, 0), peak)
            for folder in ("copy", "ours", "back"):
                shutil.rmtree(root / folder)
    base = statistics.median(seconds["copy"])
    print(f"{nbytes / 1e9:.2f} GB in bf16, {args.rounds} rounds, medians")
    print(f"{'':16s} {'seconds':>8s} {'MB/s':>6s} {'of copying':>11s} {'resident MB':>12s}")
    for title, times in seconds.items():
        taken = statistics.median(times)
        peak = f"{memory[title] / 1e6:12.0f}" if title in memory else ""
        print(f"{title:16s} {taken:8.1f} {nbytes / 1e6 / taken:6.0f} {base / taken:11.2f} {peak}")
    return 0


def write_model(folder: Path, layers: int) -> int:
    """Writes a model in Hugging Face format; returns its size in bytes."""
    folder.mkdir()
    config = {**CONFIG, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    family = FAMILIES["llama"]
    shapes = table(family, parse_config(family, config, "config.json")).theirs
    shards: list[list[TensorSource]] = [[]]
    places = {}
    for name, shape in shapes.items():
        if sum(source.nbytes for source in shards[-1]) > SHARD_BYTES:
            shards.append([])
        shards[-1].append(TensorSource(name, torch.bfloat16, shape, lambda shape=shape: random_rows(shape)))  # type: ignore[misc]
    for number, held in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensor_file(folder / file, held, {"format": "pt"})
        places |= {source.key: file for source in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return sum(source.nbytes for held in shards for source in held)


def random_rows(shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yields row blocks of random bits that are finite numbers."""
    rows = shape[0]
    for first in range(0, rows, 1024):
        yield torch.randint(0, 16000, (min(1024, rows - first), *shape[1:]), dtype=torch.int16).view(torch.bfloat16)


def copy(source: Path, target: Path) -> float:
    """Returns the seconds to copy the files of a folder and sync them."""
    started = time.perf_counter()
    target.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
        with open(target / file.name, "rb") as copied:
            os.fsync(copied.fileno())
    return time.perf_counter() - started


def convert(words: list[str]) -> tuple[float, int]:
    """Returns (seconds, largest resident bytes) of the tool's process."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, str(TOOL), *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"convert.py {' '.join(words)} ended with exit code {process.returncode}")
    return time.perf_counter() - started, usage.ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
