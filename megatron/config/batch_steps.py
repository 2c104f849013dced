"""Parses --step-batch-size-schedule."""

from __future__ import annotations

import itertools
import re

from megatron.base.errors import ConfigError

FLAG = "--step-batch-size-schedule"
_ENTRY = re.compile(r"(\d+\.?\d*|\.\d+)([KMBT]?):(\d+\.?\d*|\.\d+)([KMBT]?)", re.IGNORECASE)
_SUFFIX = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_steps(text: str, seq_length: int | None) -> tuple[tuple[int, int], ...]:
    """Returns (first sample, batch size) of each step, in order, from "THRESHOLD:BATCH_SIZE THRESHOLD:BATCH_SIZE ...".

    As in Megatron-LM, thresholds are tokens in samples of `seq_length`, rounded down to whole samples, or samples if it
    is None; numbers may end in K, M, B or T; commas are spaces; entries may have any order. Raises ConfigError.
    """
    steps = []
    for entry in text.replace(",", " ").split():
        match = _ENTRY.fullmatch(entry)
        threshold, size = (_number(*match.group(1, 2)), _number(*match.group(3, 4))) if match else (0, 0)
        if size < 1:
            raise ConfigError(f"{FLAG}: '{entry}' is not THRESHOLD:BATCH_SIZE, such as 0:768 or 250B:1536")
        steps.append((threshold // (seq_length or 1), size))
    steps.sort()
    if not steps:
        raise ConfigError(f"{FLAG} has no step; give one such as 0:768")
    if steps[0][0] != 0:
        raise ConfigError(f"{FLAG} '{text}' begins at {steps[0][0]}; let it begin at 0")
    for (first, _), (second, _) in itertools.pairwise(steps):
        if first == second:
            raise ConfigError(f"{FLAG} '{text}': two steps begin at sample {first}; leave one of them out")
    return tuple(steps)


def _number(digits: str, suffix: str) -> int:
    return int(float(digits) * _SUFFIX[suffix.upper()])
