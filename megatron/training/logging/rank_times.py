"""Judges from the times of all ranks in sampled steps which rank is slow, and in which part. Pure arithmetic.

[Note: slow ranks]
All ranks wait for the slowest one in every step, so the time of a step tells nothing about who is slow. Compute does:
the time of the step without the waits for collectives and without the input. A rank that waits for others has long
waits and the compute of its peers. Peers are the ranks of one pipeline stage, which compute the same; a stage of one
rank is compared with its own first samples, and its change with the change of the other ranks. A rank is named when
several samples in a row agree, because a processor is interrupted now and then.

A slow link is different: every rank waits longer, the slowest one too, and nobody computes longer. Then the links are
timed by messages of their own (core/comm/link_times.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from megatron.core.timeline import FinishedSpan

WAIT = "wait "
PHASE, ITERATION, INPUT = "phase", "iteration", "batch-generator"
FACTOR = 1.5  # of the compute of peers
EXCESS = 0.1  # fraction of the step that compute beyond that of peers has to take
INPUT_SHARE = 0.25  # of a step that is spent on reading samples
WAIT_GROWTH = 0.25  # of a step by which the shortest wait of all ranks has to grow before links are timed
WRITE_FACTOR, WRITE_SECONDS = 3.0, 1.0  # of the rate at which others write, and the shortest write that is judged
CONFIRMATIONS = 5  # samples in a row before a rank is named, or is no longer
BASELINE = 8  # samples of which the usual times are taken


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one rank in a sampled step, and the last files of a checkpoint that it wrote since the sample before.

    step: the whole step. wait: for collectives. input: to read samples. The phases are without their waits.
    """

    step: float
    wait: float
    input: float
    forward_backward: float
    grads_sync: float
    optimizer: float
    written_bytes: float = 0.0
    write_seconds: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds of the step that are neither waits nor input."""
        return max(self.step - self.wait - self.input, 0.0)

    def numbers(self) -> tuple[float, ...]:
        """Returns the fields, in order."""
        return astuple(self)


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slow, with "compute", "input" or "save". usual: the same of its peers, or of itself before, in
    seconds; of input the whole step; of a save the seconds that its bytes take elsewhere."""

    kind: str
    rank: int
    seconds: float
    usual: float


def measure(spans: Sequence[FinishedSpan], written: tuple[int, float] = (0, 0.0)) -> RankTimes:
    """Returns the times of one rank. spans: rows "iteration", "phase" and waits of one step."""
    waits = [span for span in spans if span.row.startswith(WAIT)]
    phases: dict[str, float] = {}
    for span in spans:
        if span.row == PHASE:
            inside = sum(_overlap(span, wait) for wait in waits)
            phases[span.name] = phases.get(span.name, 0.0) + (span.stop - span.start) - inside
    (iteration,) = [span for span in spans if span.row == ITERATION]
    return RankTimes(
        step=iteration.stop - iteration.start,
        wait=sum(_overlap(iteration, wait) for wait in waits),
        input=max(phases.get(INPUT, 0.0), 0.0),
        forward_backward=phases.get("forward-backward", 0.0),
        grads_sync=phases.get("all-grads-sync", 0.0),
        optimizer=phases.get("optimizer", 0.0),
        written_bytes=float(written[0]),
        write_seconds=written[1],
    )


class SlowRanks:
    """The ranks that are slow at present, and the samples that say so. Every rank judges the same numbers alike."""

    def __init__(self, stages: Sequence[int], *, judges_input: bool = True) -> None:
        """stages: the pipeline stage of each rank. judges_input: whether reading a batch only reads it."""
        self._peers = [
            [other for other, theirs in enumerate(stages) if theirs == stage and other != rank]
            for rank, stage in enumerate(stages)
        ]
        self._judges_input = judges_input
        self._first: list[Sequence[RankTimes]] = []  # the first samples
        self._write_rates: dict[int, list[float]] = {}
        self._slow: dict[tuple[str, int], int] = {}  # samples in a row that call a rank slow
        self._well: dict[tuple[str, int], int] = {}  # of a named rank: samples in a row that do not
        self._waiting = 0  # samples in a row in which every rank waits longer than usual

    @property
    def needs_samples(self) -> bool:
        """Whether further samples shall follow soon: the first ones, and those behind a suspicious one."""
        is_new = len(self._first) < BASELINE
        return is_new or self._waiting > 0 or any(count < CONFIRMATIONS for count in self._slow.values())

    @property
    def suspects_link(self) -> bool:
        """Whether two samples in a row say that every rank waits longer than usual."""
        return self._waiting >= 2

    def add(self, times: Sequence[RankTimes]) -> tuple[list[SlowRank], list[tuple[str, int]]]:
        """Takes the times of all ranks in one step. Returns the ranks that are slow from now on, and those that were
        named, with the kind, and are slow no more."""
        ranks = [*self._slow_compute(times), *self._slow_input(times)]
        slow = {(entry.kind, entry.rank): entry for entry in ranks}
        new = []
        for key, entry in slow.items():
            self._slow[key] = self._slow.get(key, 0) + 1
            self._well.pop(key, None)
            if self._slow[key] == CONFIRMATIONS:
                new.append(entry)
        over = []
        for key in [key for key in self._slow if key not in slow]:
            self._well[key] = self._well.get(key, 0) + 1
            is_named = self._slow[key] >= CONFIRMATIONS
            if not is_named or self._well[key] == CONFIRMATIONS:
                del self._slow[key], self._well[key]
                over += [key] if is_named else []
        self._waiting = self._waiting + 1 if self._all_wait(times) and not slow else 0
        if len(self._first) < BASELINE:
            self._first.append(times)
        return [*new, *self._slow_writes(times)], over

    def _slow_compute(self, times: Sequence[RankTimes]) -> list[SlowRank]:
        changes = self._changes(times)
        slow = []
        for rank, row in enumerate(times):
            peers = self._peers[rank]
            if peers:
                usual = statistics.median(times[peer].compute for peer in peers)
            elif changes and len(times) > 1:
                usual_change = statistics.median(change for peer, change in enumerate(changes) if peer != rank)
                usual = row.compute / changes[rank] * max(usual_change, 1.0)
            else:
                continue
            if row.compute >= FACTOR * usual and row.compute - usual >= EXCESS * row.step:
                slow.append(SlowRank("compute", rank, row.compute, usual))
        return slow

    def _slow_input(self, times: Sequence[RankTimes]) -> list[SlowRank]:
        """Returns the ranks whose input takes a large part of the step, and no less than half of the longest one."""
        longest = max(row.input for row in times)
        return [
            SlowRank("input", rank, row.input, row.step)
            for rank, row in enumerate(times)
            if self._judges_input and row.input >= max(INPUT_SHARE * row.step, longest / 2)
        ]

    def _slow_writes(self, times: Sequence[RankTimes]) -> list[SlowRank]:
        """Returns the ranks that wrote files more slowly than the others that wrote as much, or than they did before.

        One save is enough: the next one may be hours away.
        """
        largest = max(row.written_bytes for row in times)
        rates = {
            rank: row.written_bytes / max(row.write_seconds, 1e-6)
            for rank, row in enumerate(times)
            if row.written_bytes > largest / 4
        }
        slow = []
        for rank, rate in rates.items():
            usual = [speed for peer, speed in rates.items() if peer != rank]
            before = self._write_rates.setdefault(rank, [])
            references = [statistics.median(speeds) for speeds in (usual, before) if speeds]
            is_slow = bool(references) and rate * WRITE_FACTOR <= max(references)
            if is_slow and times[rank].write_seconds >= WRITE_SECONDS:
                elsewhere = times[rank].written_bytes / max(references)
                slow.append(SlowRank("save", rank, times[rank].write_seconds, elsewhere))
            else:
                before.append(rate)
        return slow

    def _all_wait(self, times: Sequence[RankTimes]) -> bool:
        """Whether the rank that waits least waits longer than usual, by a part of the usual step."""
        if len(self._first) < BASELINE:
            return False
        usual = statistics.median(min(row.wait for row in sample) for sample in self._first)
        step = statistics.median(max(row.step for row in sample) for sample in self._first)
        return min(row.wait for row in times) - usual >= WAIT_GROWTH * step

    def _changes(self, times: Sequence[RankTimes]) -> list[float]:
        """Returns the compute of each rank as a multiple of its first samples; nothing as long as they are too few."""
        if len(self._first) < BASELINE:
            return []
        usual = [statistics.median(sample[rank].compute for sample in self._first) for rank in range(len(times))]
        return [max(row.compute, 1e-9) / max(before, 1e-9) for row, before in zip(times, usual, strict=True)]


def _overlap(first: FinishedSpan, second: FinishedSpan) -> float:
    return max(0.0, min(first.stop, second.stop) - max(first.start, second.start))
