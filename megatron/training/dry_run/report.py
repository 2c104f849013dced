"""Formats the figures of a dry run, next to the planned ones."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.streams.simulated import AssumedDevice
from megatron.planner.memory.plan import RankMemory
from megatron.spec.memory import trace as kinds
from megatron.training.dry_run.trace import Traced
from megatron.training.dry_run.traced_memory import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS, TRACED_KINDS

MIB, GB = 1024**2, 10**9
_PLANNED = {kinds.PARAMETERS: PARAMETERS, kinds.GRADIENTS: GRADIENTS, kinds.OPTIMIZER: OPTIMIZER}  # others: the rest


def rank_lines(traced: Traced, planned: RankMemory, microbatches: tuple[int, int], world_size: int) -> Iterator[str]:
    """Yields lines about one rank. planned: for as many microbatches as were traced.
    microbatches: traced, and of a step."""
    yield (
        f"rank {traced.rank} of {world_size}, pipeline rank {traced.stage}: a step of {microbatches[0]} of "
        f"{microbatches[1]} microbatches traced in {traced.seconds:.1f} s, {traced.operations} operations, "
        f"{traced.host_reads} reads of the host that wait for the device"
    )
    yield from _rows([("group", "collective", "calls", "MiB"), *_traffic(traced)])
    yield from _rows([("MiB at the peak", "traced", "planned", "difference"), *_memory(traced, planned)])
    yield f"  traced peak at {traced.moment}; planned at {planned.moment}"
    yield f"  set-up takes {traced.set_up / MIB:.1f} MiB at most"


def verdict(needed: int, assumed: AssumedDevice) -> str:
    """Formats the last line of a dry run that would start. needed: bytes of the rank that needs most."""
    return f"would start: peak {needed / GB:.1f} of {assumed.memory / GB:.0f} GB ({assumed.name}, assumed)"


def _traffic(traced: Traced) -> Iterator[tuple[str, ...]]:
    for (group, collective), (calls, nbytes) in sorted(traced.traffic.items()):
        yield group, collective, str(calls), f"{nbytes / MIB:.1f}"


def _memory(traced: Traced, planned: RankMemory) -> Iterator[tuple[str, ...]]:
    planned_bytes = dict.fromkeys(TRACED_KINDS, 0)
    for kind, nbytes in planned.at_peak.items():
        planned_bytes[_PLANNED.get(kind, ACTIVATIONS)] += nbytes
    for kind in TRACED_KINDS:
        yield _compared(kind, traced.at_peak.get(kind, 0), planned_bytes[kind])
    yield _compared("most at once", traced.peak, planned.peak)


def _compared(name: str, traced: int, planned: int) -> tuple[str, ...]:
    difference = f"{100 * (traced / planned - 1):+.1f} %" if planned else ""
    return name, f"{traced / MIB:.1f}", f"{planned / MIB:.1f}", difference


def _rows(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        words = (
            cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths))
        )
        yield "  " + "  ".join(words).rstrip()
