"""--log-straggler: names ranks, disks and links that are slow, from the times of sampled steps.

[Note: a sample]
Between samples nothing is measured. In a sampled step the timeline records the waits and the phases, by the host's
clock or by events of the device, which are read when the numbers of the step are. One all-gather then tells every rank
the `RankTimes` of all, so all ranks judge alike and agree on the next sample without a word. The host reads the result
after the next step, so it never waits for the device.
"""

from __future__ import annotations

import math
import socket
import statistics
import time

import torch

from megatron.base.heartbeat import unmeasured, unmeasured_phase
from megatron.base.log import get_logger
from megatron.core.comm.collectives import all_gather, gather_objects
from megatron.core.comm.link_times import Link, link_times, pairings, shared_rank, slow_links
from megatron.core.streams.host_copy import HostCopy
from megatron.core.timeline import Recording
from megatron.training.logging.rank_times import (
    ITERATION,
    PHASE,
    WAIT,
    RankTimes,
    SlowRank,
    SlowRanks,
    measure,
)
from megatron.training.loop import Callback
from megatron.training.state import StepReport
from megatron.training.trainer import Trainer

log = get_logger(__name__)

WARMUP_STEPS = 5  # of a run, before the first sample
SAMPLE_SECONDS = 5.0  # between samples
SUSPICIOUS_SECONDS = 1.0  # between the first samples, and between those behind a suspicious one
LINK_SECONDS = 60.0  # between timings of the links at least
LONG_STEP = 1.5  # a step that takes this multiple of the usual time is followed by a sample at once
_USUAL_STEPS = 20


class LogStragglers(Callback):
    """Samples steps, prints the slowest ranks with the log lines, and warns of slow parts."""

    def __init__(self, count: int, local_rank: int) -> None:
        """count: of the slowest and fastest ranks that are printed. local_rank: of this process on its host."""
        self._count, self._local_rank = count, local_rank
        self._next: float = math.inf
        self._sampled, self._is_open = -1, False
        self._recording: Recording | None = None
        self._gathered: HostCopy | None = None
        self._writes = 0  # of this rank that earlier samples have told
        self._usual: list[float] = []  # seconds of recent steps
        self._long = False
        self._line_due = False
        self._links: dict[Link, float] = {}  # as timed first
        self._until_links = 0.0  # seconds until links may be timed again, by gathered times: the same on all ranks
        self._judged = 0  # iteration of the last judgement
        self._judged_at = 0.0  # by the clock of this rank
        self._bad_links: frozenset[Link] = frozenset()

    def start(self, trainer: Trainer) -> None:
        """Asks for the host of every rank. Communication: a gather of a name and two numbers over the world."""
        groups = trainer.groups
        places = gather_objects((socket.gethostname(), groups.rank - self._local_rank, groups.pp.rank), groups.world)
        self._hosts = [host for host, _, _ in places]
        self._rounds = pairings(sorted({first for _, first, _ in places}))
        self._judge = SlowRanks([stage for _, _, stage in places], judges_input=not trainer.run.data.perform_rl_step)
        self._first = trainer.state.iteration
        self._next = self._first + 1 + WARMUP_STEPS
        trainer.sample_wanted = lambda: self._long

    def before_step(self, trainer: Trainer) -> None:
        """Begins or ends the recording of a step."""
        self._close(trainer)
        upcoming = trainer.state.iteration + 1
        if upcoming >= self._next and not self._is_profiled(trainer, upcoming):
            timeline, heartbeat = trainer.data_parallel.timeline, trainer.groups.heartbeat
            heartbeat.during_wait = lambda op, group: timeline.span(f"{WAIT}{group}", op)
            heartbeat.during_phase = lambda phase: timeline.span(PHASE, phase)
            timeline.start((WAIT, PHASE, ITERATION))
            self._sampled, self._next, self._is_open = upcoming, math.inf, True

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        """Gathers the times of a sampled step, judges those that have arrived, and plans the next sample."""
        self._watch_steps(report)
        self._line_due |= report.iteration % trainer.run.logging.log_interval == 0
        self._take(trainer, report.iteration)
        if report.iteration == self._sampled:
            self._close(trainer)
            self._gather(trainer)
            if not trainer.reads_late:
                self._take(trainer, report.iteration)
        if report.sample_wanted and math.isfinite(self._next):
            self._next = trainer.state.iteration + 1

    def _watch_steps(self, report: StepReport) -> None:
        """Asks for a sample behind a step that took much longer than the steps before it."""
        usual = statistics.median(self._usual) if len(self._usual) == _USUAL_STEPS else math.inf
        has_paused = time.monotonic() - self._judged_at >= SUSPICIOUS_SECONDS
        self._long = report.seconds > LONG_STEP * usual and has_paused and not self._judge.needs_samples
        self._usual = [*self._usual[-_USUAL_STEPS + 1 :], report.seconds]

    def _close(self, trainer: Trainer) -> None:
        """Ends the recording of the sampled step, when that has been queued."""
        if self._is_open and trainer.state.iteration >= self._sampled:
            self._recording, self._is_open = trainer.data_parallel.timeline.close(), False
            trainer.groups.heartbeat.during_wait = unmeasured
            trainer.groups.heartbeat.during_phase = unmeasured_phase

    def _gather(self, trainer: Trainer) -> None:
        """Sends the times of this rank to all. Communication: an all-gather of 64 bytes per rank over the world."""
        assert self._recording is not None
        heartbeat = trainer.groups.heartbeat
        written = heartbeat.written if heartbeat.writes > self._writes else (0, 0.0)
        self._writes = heartbeat.writes
        times = measure(self._recording.read(), written)
        self._recording = None
        # Made by the device, because the host would wait for a copy.
        row = [torch.full((1,), number, dtype=torch.float64, device=trainer.device) for number in times.numbers()]
        self._gathered = HostCopy(all_gather(torch.cat(row).unsqueeze(0), trainer.groups.world))

    def _take(self, trainer: Trainer, iteration: int) -> None:
        """Judges the gathered times, and plans the next sample."""
        if self._gathered is None:
            return
        times = [RankTimes(*row) for row in self._gathered.read()]
        self._gathered = None
        new, over = self._judge.add(times)
        for slow_rank in new:
            log_warning(trainer, f"iteration {iteration}: {self._sentence(slow_rank)}")
        for kind, rank in over:
            log_warning(trainer, f"iteration {iteration}: rank {rank} is no longer slow ({kind})")
        if self._line_due:
            self._line_due = False
            log.info(self._line(times))
        step = max(max(row.step for row in times), 1e-3)
        self._until_links -= step * (iteration - self._judged)
        self._judged, self._judged_at = iteration, time.monotonic()
        if self._rounds and self._until_links <= 0 and (self._judge.suspects_link or not self._links):
            self._time_links(trainer, iteration)
        pause = SUSPICIOUS_SECONDS if self._judge.needs_samples else SAMPLE_SECONDS
        self._next = trainer.state.iteration + max(1, math.ceil(pause / step))

    def _time_links(self, trainer: Trainer, iteration: int) -> None:
        """Times the links between hosts, and warns of slow ones. Twice, so that one hiccup names nobody.

        Communication: messages between the first ranks of the hosts, and a gather of their times over the world.
        """
        self._until_links = LINK_SECONDS
        now: dict[Link, float] = {}
        for _ in range(2):
            mine = link_times(trainer.groups.world, self._rounds, trainer.device)
            for measured in gather_objects(mine, trainer.groups.world):
                for link, seconds in measured.items():
                    now[link] = min(seconds, now.get(link, math.inf))
        slow = slow_links(now, self._links)
        self._links = self._links or now
        if slow and frozenset(slow) != self._bad_links:
            log_warning(trainer, f"iteration {iteration}: {self._link_sentence(slow, now)}")
        self._bad_links = frozenset(slow)

    def _is_profiled(self, trainer: Trainer, iteration: int) -> bool:
        """Whether --profile-timeline may record in this step."""
        logging, number = trainer.run.logging, iteration - self._first
        is_near = logging.profile_step_start - 1 <= number <= logging.profile_step_end
        return logging.profile_timeline is not None and is_near

    def _sentence(self, slow: SlowRank) -> str:
        where = f"rank {slow.rank} on {self._hosts[slow.rank]}"
        match slow.kind:
            case "compute":
                return f"{where} computes slowly: {slow.seconds:.3f} s of a step, {slow.usual:.3f} s elsewhere"
            case "input":
                return f"{where} reads its samples slowly: {slow.seconds:.3f} s of a step of {slow.usual:.3f} s"
            case _:
                return (
                    f"{where} wrote its files of a checkpoint slowly: {slow.seconds:.1f} s, {slow.usual:.1f} s at the "
                    "usual rate"
                )

    def _link_sentence(self, slow: dict[Link, float], now: dict[Link, float]) -> str:
        worst = max(slow, key=lambda link: now[link] / slow[link])
        shared = shared_rank(list(slow))
        if shared is not None:
            where = f"the links of rank {shared} on {self._hosts[shared]} are slow"
        else:
            where = "the link between " + " and ".join(f"rank {rank} on {self._hosts[rank]}" for rank in worst)
            where += " is slow"
        return f"{where}: 1 MiB takes {1e3 * now[worst]:.1f} ms, {1e3 * slow[worst]:.1f} ms elsewhere or before"

    def _line(self, times: list[RankTimes]) -> str:
        """Returns the ranks with the longest and the shortest compute, and the range of each part over ranks."""
        order = sorted(range(len(times)), key=lambda rank: -times[rank].compute)
        parts = [
            f"{name} {min(values):.3f} to {max(values):.3f}"
            for name, values in (
                ("compute", [row.compute for row in times]),
                ("wait", [row.wait for row in times]),
                ("input", [row.input for row in times]),
            )
        ]
        shown = [("slowest", order[: self._count]), ("fastest", order[::-1][: self._count])]
        for name, ranks in shown:
            parts.append(f"{name}: " + "; ".join(self._of_rank(rank, times[rank]) for rank in ranks))
        return f"seconds of iteration {self._sampled} over ranks | " + " | ".join(parts)

    def _of_rank(self, rank: int, times: RankTimes) -> str:
        return (
            f"rank {rank} on {self._hosts[rank]}, compute {times.compute:.3f} (forward-backward "
            f"{times.forward_backward:.3f}, all-grads-sync {times.grads_sync:.3f}, optimizer {times.optimizer:.3f})"
        )


def log_warning(trainer: Trainer, text: str) -> None:
    """Logs a warning that all ranks know, once."""
    if trainer.groups.rank == 0:
        log.warning(text)
