"""Schedules by short calls, and as text."""

from megatron.schedule.schedules.gpipe import GPIPE
from megatron.schedule.schedules.interleaved import INTERLEAVED
from megatron.schedule.schedules.one_f_one_b import ONE_F_ONE_B
from megatron.schedule.schedules.zb_h1 import ZB_H1
from megatron.schedule.schedules.zb_v import ZB_V

gpipe, one_f_one_b, zb_h1, zb_v = GPIPE.build, ONE_F_ONE_B.build, ZB_H1.build, ZB_V.build


def interleaved(p, v, m, group=None):
    return INTERLEAVED.build(p, m, v=v, group=group)


def all_schedules(p, m):
    """Every training schedule of p ranks and m microbatches, by what to call it."""
    return {
        "gpipe": gpipe(p, m),
        "1f1b": one_f_one_b(p, m),
        "zb-h1": zb_h1(p, m),
        "zb-v": zb_v(p, m),
        **{f"interleaved {v}": interleaved(p, v, m) for v in (2, 3, 4)},
    }


def text(actions):
    """As '0' for microbatch 0 of a rank's first stage, with a prime for a later one: F0 F1 F0' B0' B0."""
    first = min(action.stage for action in actions)
    return " ".join(str(a).split("@")[0] + ("'" if a.stage > first else "") for a in actions)
