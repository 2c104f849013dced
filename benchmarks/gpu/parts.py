"""The parts of the checklist, the choice between their cases on the command line, and the order of their worth. No
torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.base.errors import ConfigError

# A process that imports torch, the framework and its kernels, and opens the GPU.
START_SECONDS = 9.0


@dataclass(frozen=True)
class Part:
    """One part: its letter, and the module with its cases."""

    letter: str
    title: str
    module: str


PARTS = {
    part.letter: part
    for part in (
        Part("A", "machine", "benchmarks.gpu.part_a_machine"),
        Part("B", "tests/gpu", "benchmarks.gpu.part_b_tests"),
        Part("C", "attention", "benchmarks.gpu.part_c_attention"),
        Part("D", "operations", "benchmarks.gpu.part_d_operations"),
        Part("E", "fp8", "benchmarks.gpu.part_e_fp8"),
        Part("F", "two ranks", "benchmarks.gpu.part_f_two_ranks"),
        Part("G", "speed", "benchmarks.gpu.part_g_speed"),
        Part("H", "peers", "benchmarks.gpu.part_h_peers"),
        Part("I", "profile", "benchmarks.gpu.part_i_profile"),
        Part("J", "memory and resume", "benchmarks.gpu.part_j_memory"),
    )
}


class Planned(NamedTuple):
    """A case as the driver knows it: see `Case`."""

    part: str
    module: str
    name: str
    seconds: float
    limit: float

    @property
    def title(self) -> str:
        """The part's letter and the name, as results show them and --cases matches them."""
        return f"{self.part} {self.name}"


# Cases by their worth: a case stands where the first of these expressions matches the start of its title. Those that
# none matches come before the last two groups.
FIRST = (
    r"A (versions|packages|copy|gemm|.*FlashAttention-3)",
    r"G 8B slice, (parity|baseline)",
    r"G 8B slice, fp8 (blockwise|tensorwise)",
    r"G (1B|experts(, fp8 blockwise)?)$",
    r"C (framework|documents)",
    r"J plan, ",
    r"H (this framework$|transformers, fused AdamW|Transformer Engine)",
    r"I (8B slice, baseline|experts)",
    r"F (EP 2|PP 2, (1f1b|zb-v)|TP 2, sequence parallel|DP 2, ZeRO-3, overlap|CP 2, p2p)$",
    r"E .*against the CPU",
    r"D (weight gradient|adamw)",
    r"C ",
)
LAST = (r"B |D .*inductor", r"H .*compiled")


def chosen(text: str) -> list[Part]:
    """Returns the parts of letters and ranges of letters, such as "A-F" or "A,C,H-J", in the order of the alphabet.

    Raises ConfigError.
    """
    letters: set[str] = set()
    for word in text.upper().split(","):
        ends = re.fullmatch(r"([A-Z])(?:-([A-Z]))?", word.strip())
        first, last = (ends[1], ends[2] or ends[1]) if ends else ("", "")
        span = {letter for letter in PARTS if first <= letter <= last}
        if not ends or first not in PARTS or last not in PARTS or not span:
            raise ConfigError(f"--parts {text} must be letters from A to {max(PARTS)}, such as A-F or A,C,H-J")
        letters |= span
    return [PARTS[letter] for letter in sorted(letters)]


def by_worth(cases: Sequence[Planned]) -> list[Planned]:
    """Returns the cases with those first that are worth most on a machine that is there for minutes only."""

    def rank(case: Planned) -> int:
        for number, pattern in enumerate(FIRST):
            if re.match(pattern, case.title):
                return number
        late = [re.match(pattern, case.title) is not None for pattern in LAST]
        return len(FIRST) + (1 + late.index(True) if any(late) else 0)

    return sorted(cases, key=rank)


def processes(cases: Sequence[Planned]) -> list[list[Planned]]:
    """Returns the cases of each process: neighbours of one part."""
    return [list(group) for _, group in itertools.groupby(cases, key=lambda case: case.part)]


def that_fit(cases: Sequence[Planned], seconds: float) -> list[Planned]:
    """Returns the cases that fit into so many seconds as planned; the start of their processes counts."""
    fitting: list[Planned] = []
    for group in processes(cases):
        start = START_SECONDS
        for case in group:
            if start + case.seconds <= seconds:
                fitting.append(case)
                seconds -= start + case.seconds
                start = 0.0
    return fitting


def planned_seconds(cases: Sequence[Planned]) -> float:
    """Returns the seconds that the cases are planned to take, with the start of their processes."""
    return START_SECONDS * len(processes(cases)) + sum(case.seconds for case in cases)
