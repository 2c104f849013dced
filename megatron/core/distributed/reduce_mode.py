"""Whether gradients are reduced once per step or after every microbatch: the cost of each mode, and the choice.

Per step: traffic R, the time of one reduction, of which the last backward (time B) hides up to B; the whole fp32 gradient
is kept. After every microbatch: g microbatches bring g x R, and each backward hides up to B of it; only a shard is kept, and
backward waits where the wire is slower than it, for lack of memory to put gradients in. So the first is never slower, and
the choice is a matter of memory. Megatron-LLaMA always reduces every microbatch and loses where g is large.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.data_parallel import EVERY, LAST

_MIB = 1024**2


@dataclass(frozen=True)
class ReduceProfile:
    """The slowest rank's times and the smallest rank's room. Bytes and seconds."""

    gradient_bytes: int  # of the whole fp32 gradient
    extra_bytes: int  # memory for keeping it, beyond that for reducing every microbatch
    reduce_seconds: float  # R, all buckets, not overlapped with anything
    backward_seconds: float  # B, without waiting for communication
    headroom_bytes: int


def choose_mode(microbatches: int, measured: ReduceProfile) -> tuple[str, str]:
    """(mode, the numbers behind it) for steps of so many microbatches."""
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
