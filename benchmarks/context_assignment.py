"""How evenly documents of different lengths are shared: by packing them into samples of one length, and with
--dynamic-context-parallel. Counts work, which needs no device.

    python -m benchmarks.context_assignment
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.config.context_parallel import GroupSizes
from megatron.config.model import ModelConfig
from megatron.config.presets import PRESETS
from megatron.core.context_parallel.assignment import Slot, assign
from megatron.core.datasets.packing import best_fit_decreasing
from megatron.spec.decoder import decoder_spec
from megatron.spec.flops import train_flops

BATCHES = 200
KIB = 1024
Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mix:
    """Documents of a global batch, and the layout that trains on them.

    draw: lengths of a batch. longest: tokens, the length of a sample of plain packing. cp, dp: of plain packing; the
    sequence is as long on a rank as with dynamic groups, longest / cp.
    """

    name: str
    source: str
    draw: Callable[[np.random.Generator], Lengths]
    longest: int
    cp: int
    dp: int

    @property
    def ranks(self) -> int:
        """Ranks of dp x cp."""
        return self.cp * self.dp


def chats(random: np.random.Generator, count: int, longest: int) -> Lengths:
    """Returns log-normal lengths with the mean of LMSYS-Chat-1M: 2.0 turns of 69.5 tokens and 214.5 in answer."""
    lengths = random.lognormal(np.log(2.0 * (69.5 + 214.5)) - 0.5, 1.0, count)
    return np.clip(lengths, 16, longest).astype(np.int64)


def long_documents(random: np.random.Generator, count: int) -> Lengths:
    """Returns lengths of 8K to 64K tokens, the range of LongAlign-10k, uniform in their logarithm."""
    return np.exp(random.uniform(np.log(8 * KIB), np.log(64 * KIB), count)).astype(np.int64)


def chats_with_books(random: np.random.Generator, count: int) -> Lengths:
    """Returns chats of which one in a hundred is 256K tokens long, the most of the second stage of Qwen2.5-1M."""
    lengths = chats(random, count, 32 * KIB)
    lengths[random.permutation(count)[: count // 100]] = 256 * KIB
    return lengths


MIXES = (
    Mix("short chats", "arXiv 2309.11998, table 1", lambda random: chats(random, 2048, 4 * KIB), 4 * KIB, 1, 32),
    Mix("documents of 8K to 64K", "arXiv 2401.18058", lambda random: long_documents(random, 128), 64 * KIB, 4, 8),
    Mix("chats, 1 % of 256K", "arXiv 2501.15383", lambda random: chats_with_books(random, 1024), 256 * KIB, 8, 4),
)


@functools.cache
def linear_cost() -> float:
    """Returns c of the work s^2 + c s of a document with s tokens in Llama 3.1 8B, from its FLOP count."""
    spec = decoder_spec(ModelConfig(**PRESETS["llama3.1-8b"]))
    one, two = (train_flops(spec, length, 1) for length in (KIB, 2 * KIB))
    square = (two - 2 * one) / (2 * KIB**2)
    return (one - square * KIB**2) / square / KIB


def work(length: int) -> float:
    """Returns the work of a document."""
    return length * (length + linear_cost())


def of_packing(lengths: Sequence[int], mix: Mix, random: np.random.Generator) -> tuple[float, float]:
    """Returns work of the busiest rank over the mean, and the same if ranks wait at every microbatch.

    Samples are packed as for conversations, and those of a batch are read in random order.
    """
    falling = np.array(sorted(lengths, reverse=True))
    samples = np.bincount(best_fit_decreasing(falling, mix.longest), weights=falling * (falling + linear_cost()))
    samples = np.append(samples, np.zeros(-len(samples) % mix.dp))  # a batch is a whole number of microbatches
    by_slot = random.permutation(samples).reshape(-1, mix.dp)
    mean = by_slot.sum() / mix.dp
    return by_slot.sum(0).max() / mean, by_slot.max(1).sum() / mean


def of_groups(lengths: Sequence[int], slots: Sequence[Slot], ranks: int) -> tuple[float, float]:
    """The same of an assignment."""
    loads = np.zeros((len(slots), ranks))
    for row, slot in zip(loads, slots, strict=True):
        for first, size, documents in slot:
            row[first : first + size] = sum(work(lengths[number]) for number in documents) / size
    mean = loads.sum() / ranks
    return loads.sum(0).max() / mean, loads.max(1).sum() / mean


def measured(mix: Mix, batches: int = BATCHES) -> npt.NDArray[np.float64]:
    """Returns [batches, 4]: `of_packing` and `of_groups` of batches that are drawn from seed 0."""
    random = np.random.default_rng(0)
    sizes = GroupSizes(mix.ranks, 1, mix.ranks, mix.longest // mix.cp)
    rows = []
    for _ in range(batches):
        lengths = mix.draw(random).tolist()
        rows.append((*of_packing(lengths, mix, random), *of_groups(lengths, assign(lengths, sizes, work), mix.ranks)))
    return np.array(rows)


def main() -> None:
    """Prints a row per mix of documents."""
    print(f"{BATCHES} batches; busiest rank / mean: average (largest)")
    for mix in MIXES:
        rows = measured(mix)
        cells = [f"{mean:.3f} ({most:.3f})" for mean, most in zip(rows.mean(0), rows.max(0), strict=True)]
        packed, waiting, groups, groups_waiting = cells
        print(f"{mix.name}, {mix.source}; cp {mix.cp} x dp {mix.dp}, {mix.longest // mix.cp} tokens on a rank")
        print(f"  packed into samples of {mix.longest}: {packed}; if ranks wait at every microbatch {waiting}")
        print(f"  --dynamic-context-parallel: {groups}; if ranks wait at every microbatch {groups_waiting}")


if __name__ == "__main__":
    main()
