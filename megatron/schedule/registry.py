"""All pipeline schedules by their command-line names. A new one is a file in `schedules/` and an entry here."""

from __future__ import annotations

from megatron.schedule.schedules.gpipe import GPIPE
from megatron.schedule.schedules.interleaved import INTERLEAVED
from megatron.schedule.schedules.one_f_one_b import ONE_F_ONE_B
from megatron.schedule.schedules.zb_h1 import ZB_H1
from megatron.schedule.schedules.zb_v import ZB_V
from megatron.schedule.spec import ScheduleSpec

SCHEDULES = {spec.name: spec for spec in (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZB_V)}


def schedule_or_default(name: str | None, virtual_stages: int | None) -> ScheduleSpec:
    """Returns the schedule of that name; without a name 1F1B, or with several virtual stages per rank its interleaved
    form.
    """
    if name is not None:
        return SCHEDULES[name]
    return INTERLEAVED if (virtual_stages or 1) > 1 else ONE_F_ONE_B
