"""How fast a rank computes while its steps are measured, compared with the time of the profile.

The speed of virtual processors varies by a fifth within seconds. So every rank computes the layer that the profile
measures between all others (megatron/tooling/profile/reference.py): before the step at the beginning of each rate,
which does not count. Before the steps that count it would give gathers of parameters, which outlast a step, time that a
run does not have.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

import torch

from benchmarks.planner.emulated.grid import COUNTED, LEFT_OUT, RANKS, STEPS
from megatron.planner.search.layout import Layout
from megatron.planner.time.profile_file import MachineProfile
from megatron.tooling.plan.run import settings_of
from megatron.tooling.profile.layers import reference_layer
from megatron.training.trainer import Trainer

MICRO_BATCH = 2  # of the layer, the first that a profile measures
_CALLS = 9
_LINE = re.compile(r"reference: (\S+) ms")


def measure_in_run(flags: Sequence[str]) -> None:
    """Makes the run of this process, with these flags, compute the reference when a rate begins, and print its time."""
    run, _ = settings_of(flags, RANKS, description="A case.")
    probe = reference_layer(run, torch.device("cpu"), Layout(micro_batch=MICRO_BATCH))
    queue_step = Trainer.queue_step

    def measured(self: Trainer) -> None:
        step = self.state.iteration + 1
        if 1 < step <= STEPS and (step - 2) % (LEFT_OUT + COUNTED) == 0:
            milliseconds = 1e3 * statistics.median(probe.laps().seconds for _ in range(_CALLS))
            print(f"reference: {milliseconds:.4f} ms", flush=True)
        queue_step(self)

    Trainer.queue_step = measured  # type: ignore[method-assign]


def references_of(text: str) -> list[float]:
    """Returns the milliseconds at each rate, in order, of a rank's log."""
    return list(map(float, _LINE.findall(text)))


def reference_of(profile: MachineProfile) -> float:
    """Returns the milliseconds of the reference in a profile."""
    row = next(row for row in profile.layers if row.layout == Layout(micro_batch=MICRO_BATCH))
    return 1e3 * (row.forward_seconds + row.input_grad_seconds + row.weight_grad_seconds)
