"""Chooses between reducing gradients once per step and after every microbatch, by the cost of each mode.

Let R be the time of one reduction, B that of one backward, and g the number of microbatches. Once per step, the
reduction takes R, of which up to B is overlapped with the last backward, and the whole fp32 gradient is kept. After
every microbatch, the reductions take g x R, of which up to B is overlapped with each backward. Only a shard is kept,
and a backward that is faster than its reduction waits, because there is no memory for more gradients. So the first mode
is never slower, and the choice depends on memory only. Megatron-LLaMA always reduces after every microbatch, which is
slow if g is large.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.data_parallel import EVERY, LAST

_MIB = 1024**2


@dataclass(frozen=True)
class ReduceProfile:
    """The times of the slowest rank in seconds, and the memory of the rank with the least free, in bytes."""

    gradient_bytes: int  # of the whole fp32 gradient
    extra_bytes: int  # memory for keeping it, beyond that for reducing every microbatch
    reduce_seconds: float  # R, all buckets, not overlapped with anything
    backward_seconds: float  # B, without waiting for communication
    headroom_bytes: int


def choose_mode(microbatches: int, measured: ReduceProfile) -> tuple[str, str]:
    """Returns (mode, the figures that decide it) for steps of so many microbatches."""
    exposed = max(0.0, measured.reduce_seconds - measured.backward_seconds)
    rate = measured.gradient_bytes / max(measured.reduce_seconds, 1e-9) / 1e6
    numbers = (
        f"{microbatches} microbatch{'' if microbatches == 1 else 'es'}; reducing "
        f"{measured.gradient_bytes / _MIB:.0f} MiB takes {measured.reduce_seconds:.3f} s ({rate:.0f} MB/s), a backward "
        f"{measured.backward_seconds:.3f} s: exposed {exposed:.3f} s per step if reduced once, "
        f"{microbatches * exposed:.3f} s if after every microbatch; keeping the gradient takes "
        f"{measured.extra_bytes / _MIB:.0f} MiB more, of {measured.headroom_bytes / _MIB:.0f} MiB free"
    )
    return (LAST if measured.extra_bytes <= measured.headroom_bytes else EVERY), numbers
