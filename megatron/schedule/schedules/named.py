"""A schedule by its name on the command line."""

from __future__ import annotations

from megatron.base.errors import ConfigError
from megatron.schedule.schedule import Schedule
from megatron.schedule.schedules.gpipe import gpipe
from megatron.schedule.schedules.interleaved import interleaved
from megatron.schedule.schedules.one_f_one_b import one_f_one_b
from megatron.schedule.schedules.zb_h1 import zb_h1
from megatron.schedule.schedules.zb_v import zb_v

_ONE_CHUNK = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1}
NAMES = (*_ONE_CHUNK, "interleaved", "zb-v")


def chunks_of(name: str, asked: int | None) -> int:
    """Virtual stages a rank under a schedule: `asked`, or without it what the schedule needs.

    Raises ConfigError for an unknown name, and where the two do not fit.
    """
    if name not in NAMES:
        raise ConfigError(f"schedule {name} is unknown; give one of {', '.join(NAMES)}")
    if name == "interleaved":
        if asked is None or asked < 2:
            raise ConfigError(
                "schedule interleaved needs 2 or more virtual stages a rank; give them, or take schedule 1f1b"
            )
        return asked
    needed = 2 if name == "zb-v" else 1
    if asked not in (None, needed):
        raise ConfigError(
            f"schedule {name} has {needed} virtual stage{'s' if needed > 1 else ''} a rank, not {asked}; "
            "leave out their number, or take schedule interleaved"
        )
    return needed


def build(name: str, p: int, m: int, *, v: int | None = None, group: int | None = None) -> Schedule:
    """The computations of p ranks and m microbatches. Raises ConfigError where the arguments do not fit the schedule.

    v: virtual stages a rank. group: of `interleaved` only, see there.
    """
    v = chunks_of(name, v)
    if name == "interleaved":
        return interleaved(p, v, m, group)
    if group is not None:
        raise ConfigError(
            f"--microbatch-group-size-per-virtual-pipeline-stage has no effect under schedule {name}; remove it"
        )
    return zb_v(p, m) if name == "zb-v" else _ONE_CHUNK[name](p, m)
