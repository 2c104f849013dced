"""A save in the background (--async-save) against one that training waits for, on emulated disks.

One process trains a small model and saves every few steps: without saves, with saves that training waits for, and with
saves in the background, alternately. An emulated disk takes a file at the given rate: the thread that wrote it sleeps
for the rest of the time, as it would in a write to such a disk. "training waits" is the time by the host's clock for
which no step is queued because of a save: the least of all rounds, because whatever else runs on the machine only adds
to it. "CPU" is the processor time that a save adds to that of the steps, a median.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.base.heartbeat import Heartbeat
from megatron.base.mesh import Mesh
from megatron.command_line.read import parse
from megatron.config.rules.check import check
from megatron.core.dist_checkpointing import storage
from megatron.core.dist_checkpointing.tensor_file import TensorSource, write_tensor_file
from megatron.core.groups import create_groups
from megatron.training.background_save import SavePrice
from megatron.training.checkpoint import begin_save, finish_save, save_checkpoint
from megatron.training.setup import build
from megatron.training.trainer import Trainer

LINE = (
    "--num-layers 4 --hidden-size 384 --ffn-hidden-size 1024 --num-attention-heads 6 --seq-length 256 "
    "--micro-batch-size 2 --global-batch-size 2 --vocab-size 8192 --tokenizer-type NullTokenizer --mock-data "
    "--train-iters 100000 --lr 1e-3 --eval-iters 0 --num-workers 0 --device cpu --normalization RMSNorm --swiglu "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --bf16"
)
NONE, WAITING, BACKGROUND = "none", "waiting", "background"


class Sample(NamedTuple):
    """Steps with a save or without. seconds, cpu_seconds: of all of it. exposed: for which training waited."""

    seconds: float
    cpu_seconds: float
    exposed: float
    nbytes: int


class EmulatedDisk:
    """Writes files at this many bytes per second; None: as fast as the real disk."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate

    def write(self, path: Path, sources: Sequence[TensorSource]) -> dict[str, tuple[str, ...]]:
        """As write_tensor_file."""
        started = time.perf_counter()
        checksums = write_tensor_file(path, sources)
        if self._rate is not None:
            time.sleep(max(0.0, started + path.stat().st_size / self._rate - time.perf_counter()))
        return checksums


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[200.0, 50.0], help="MB/s of the emulated disks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="on the disk to write to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run = parse(
            [*LINE.split(), *f"--save {folder} --save-interval 1000000 --save-retain 2 --async-save".split()],
            description="",
        )
        check(run, 1)
        trainer = build(run, create_groups(Mesh.create(1), 0, Heartbeat(0), 600.0), torch.device("cpu"))
        numel = sum(parameter.numel() for parameter in trainer.model.parameters())
        print(f"{numel / 1e6:.1f} M parameters, bf16, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
        print("| disk | MiB | save | training waits ms | share | CPU ms |")
        print("|---|---|---|---|---|---|")
        for rate in [None, *args.rates]:
            measure(trainer, rate, args.rounds)


def measure(trainer: Trainer, rate: float | None, rounds: int) -> None:
    """Prints two rows of the table. rate: of the disk in MB/s, None: of the real one."""
    storage.write_tensor_file = EmulatedDisk(None if rate is None else 1e6 * rate).write  # type: ignore[attr-defined]
    steps = 1
    samples: dict[str, list[Sample]] = {NONE: [], WAITING: [], BACKGROUND: []}
    while sampled(trainer, WAITING, steps).exposed > 0.7 * sampled(trainer, NONE, steps).seconds:
        steps *= 2  # a save in the background shall end before the next one
    sampled(trainer, BACKGROUND, steps)
    for _ in range(rounds):
        for kind, of_kind in samples.items():
            of_kind.append(sampled(trainer, kind, steps))
    disk, mib = "as it is" if rate is None else f"{rate:.0f} MB/s", samples[BACKGROUND][0].nbytes / 2**20
    exposed = {kind: min(sample.exposed for sample in of_kind) for kind, of_kind in samples.items()}
    cpu = {kind: statistics.median(sample.cpu_seconds for sample in of_kind) for kind, of_kind in samples.items()}
    for kind in (WAITING, BACKGROUND):
        print(
            f"| {disk} | {mib:.0f} | {kind} | {1e3 * exposed[kind]:.1f} | {exposed[kind] / exposed[WAITING]:.1%} | "
            f"{1e3 * (cpu[kind] - cpu[NONE]):.0f} |",
            flush=True,
        )


def sampled(trainer: Trainer, kind: str, steps: int) -> Sample:
    """Saves, unless the kind is NONE, and takes steps."""
    started, cpu_started, exposed, nbytes = time.perf_counter(), time.process_time(), 0.0, 0
    if kind == BACKGROUND:
        price = saved_in_background(trainer, steps)
        exposed, nbytes = price.exposed_seconds, price.nbytes
    else:
        if kind == WAITING:
            save_checkpoint(trainer)
            exposed = time.perf_counter() - started
        for _ in range(steps):
            trainer.train_step()
    return Sample(time.perf_counter() - started, time.process_time() - cpu_started, exposed, nbytes)


def saved_in_background(trainer: Trainer, steps: int) -> SavePrice:
    """Begins a save and takes steps, during which it is published; waits at the end if it is not."""
    background, world = trainer.background_save, trainer.groups.world
    assert background is not None
    background.begin(functools.partial(begin_save, trainer))
    for _ in range(steps):
        remaining = trainer.train_step().save_remaining
        if remaining is not None and background.advance(remaining):
            background.finish(functools.partial(finish_save, trainer))
            price = background.close(world)
    if background.pending is not None:
        background.finish(functools.partial(finish_save, trainer))
        price = background.close(world)
    return price


if __name__ == "__main__":
    main()
