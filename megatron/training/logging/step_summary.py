"""Attributes the time of a recorded step to compute, exposed communication, and the pipeline's bubble.

It counts the waits of a rank's compute, not the transfers: a transfer that is fully overlapped costs nothing. On CUDA
the waits are those of the compute stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.timeline import FinishedSpan

WAIT = "wait "  # rows of waits have this prefix before the group's name
COMPUTE, BUBBLE, OTHER = "compute", "bubble", "other"
_ROWS_OF_WORK = ("compute", "step")


@dataclass(frozen=True)
class StepSummary:
    """A step of all ranks. `shares` is the mean over ranks of the fraction of the step per kind; they add up to 1.

    Kinds: "compute"; exposed communication by axis, "tp", "cp", "dp", "pp"; "bubble", waits for a neighbouring stage
    that had not yet computed its message; "other", the host's work between them.
    """

    name: str
    seconds: float  # of the slowest rank
    shares: dict[str, float]


@dataclass(frozen=True)
class _Step:
    """A rank's spans of one iteration."""

    seconds: float
    spans: list[FinishedSpan]

    def named(self, row: str, prefix: str) -> list[FinishedSpan]:
        return [span for span in self.spans if span.row == row and span.name.startswith(prefix)]


def summarize(ranks: Sequence[Sequence[FinishedSpan]]) -> list[StepSummary]:
    """Returns one summary per iteration that all ranks recorded. `ranks`: spans by rank, with comparable times.

    Waits for other ranks of an axis count as its communication, regardless of the reason for the delay; the time of
    sending is known only for pipeline messages.
    """
    iterations = [{span.name: span for span in spans if span.row == "iteration"} for spans in ranks]
    return [
        _summary(name, [_within(spans, named[name]) for spans, named in zip(ranks, iterations, strict=True)])
        for name in iterations[0]
        if all(name in named for named in iterations)
    ]


def format_summary(summary: StepSummary) -> str:
    """Formats one line in the style of the log's."""
    parts = [f"{kind} {share:.1%}" for kind, share in summary.shares.items()]
    return f"where {summary.name} went: {1e3 * summary.seconds:.1f} ms | " + " | ".join(parts)


def _summary(name: str, ranks: Sequence[_Step]) -> StepSummary:
    shares: dict[str, float] = {}
    for step in ranks:
        for kind, seconds in _seconds(step, ranks).items():
            shares[kind] = shares.get(kind, 0.0) + seconds / step.seconds / len(ranks)
    order = [COMPUTE, *sorted(shares.keys() - {COMPUTE, BUBBLE, OTHER}), BUBBLE, OTHER]
    return StepSummary(
        name, max(step.seconds for step in ranks), {kind: shares[kind] for kind in order if kind in shares}
    )


def _within(spans: Sequence[FinishedSpan], iteration: FinishedSpan) -> _Step:
    inside = [span for span in spans if iteration.start <= span.start < iteration.stop]
    return _Step(iteration.stop - iteration.start, [span for span in inside if span is not iteration])


def _seconds(step: _Step, ranks: Sequence[_Step]) -> dict[str, float]:
    """Returns the seconds by kind of one rank."""
    waits = [span for span in step.spans if span.row.startswith(WAIT)]
    work = [span for span in step.spans if span.row in _ROWS_OF_WORK]
    hidden_in_work = sum(_overlap(wait, span) for wait in waits for span in work)
    seconds = {COMPUTE: sum(_length(span) for span in work) - hidden_in_work}
    for wait in waits:
        group = wait.row.removeprefix(WAIT)
        idle = _before_sending(wait, group, step, ranks) if group.startswith("pp") else 0.0
        for kind, part in ((BUBBLE, idle), (_axis(group), _length(wait) - idle)):
            if part:
                seconds[kind] = seconds.get(kind, 0.0) + part
    seconds[OTHER] = step.seconds - sum(seconds.values())
    return seconds


def _axis(group: str) -> str:
    """Returns the axis of a group by its name.

    cp has parts, pp has lines; buckets and sums over replicas are data parallelism. Copies to and from host memory are
    counted like communication.
    """
    axes = ("tp", "cp", "pp", "offload")
    return "pp" if group == "ends" else next((axis for axis in axes if group.startswith(axis)), "dp")


def _before_sending(wait: FinishedSpan, group: str, step: _Step, ranks: Sequence[_Step]) -> float:
    """Returns the seconds of a wait before the message was sent: the n-th receive of a line is the n-th send."""
    if not wait.name.startswith("receive"):
        # A wait for all stages together: those that have finished wait for the last one.
        return 0.0 if wait.name.startswith("send") else _length(wait)
    names = [span.name for span in step.named(group, "receive")]
    source = int(group.removeprefix("pp ").split(">")[0])
    sends = ranks[source].named(group, "send")
    if wait.name not in names or len(sends) != len(names):
        return 0.0  # the message crosses the ends of the recording
    sent = sends[names.index(wait.name)].start
    return min(max(0.0, sent - wait.start), _length(wait))


def _overlap(first: FinishedSpan, second: FinishedSpan) -> float:
    return max(0.0, min(first.stop, second.stop) - max(first.start, second.start))


def _length(span: FinishedSpan) -> float:
    return span.stop - span.start
