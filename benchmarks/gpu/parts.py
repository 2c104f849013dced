"""The parts of the checklist, and the choice between them on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.base.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """One part: its letter, the module with its cases, and the seconds that it is planned to take on a GPU."""

    letter: str
    title: str
    module: str
    seconds: float


PARTS = {
    part.letter: part
    for part in (
        Part("A", "machine", "benchmarks.gpu.part_a_machine", 35.0),
        Part("B", "tests/gpu", "benchmarks.gpu.part_b_tests", 145.0),
        Part("C", "attention", "benchmarks.gpu.part_c_attention", 70.0),
        Part("D", "operations", "benchmarks.gpu.part_d_operations", 80.0),
        Part("E", "fp8", "benchmarks.gpu.part_e_fp8", 78.0),
        Part("F", "two ranks", "benchmarks.gpu.part_f_two_ranks", 150.0),
        Part("G", "speed", "benchmarks.gpu.part_g_speed", 270.0),
        Part("H", "peers", "benchmarks.gpu.part_h_peers", 90.0),
        Part("I", "profile", "benchmarks.gpu.part_i_profile", 50.0),
        Part("J", "memory and resume", "benchmarks.gpu.part_j_memory", 148.0),
    )
}


def chosen(text: str) -> list[Part]:
    """Returns the parts of letters and ranges of letters, such as "A-F" or "A,C,H-J", in the order of the alphabet.

    Raises ConfigError.
    """
    letters: set[str] = set()
    for word in text.upper().split(","):
        ends = re.fullmatch(r"([A-Z])(?:-([A-Z]))?", word.strip())
        first, last = (ends[1], ends[2] or ends[1]) if ends else ("", "")
        found = {letter for letter in PARTS if first <= letter <= last}
        if not ends or first not in PARTS or last not in PARTS or not found:
            raise ConfigError(f"--parts {text} must be letters from A to {max(PARTS)}, such as A-F or A,C,H-J")
        letters |= found
    return [PARTS[letter] for letter in sorted(letters)]
