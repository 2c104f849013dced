"""PyTorch's record of the last collectives of this process, which its own tools read."""

from __future__ import annotations

from torch._C import _distributed_c10d as c10d

# Builds with NCCL have the first function, and builds for the CPU the second one.
_DUMP = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)


def flight_record() -> bytes | None:
    """Returns the pickled record, with the state of every collective and without stacks; None without a recorder.

    It does not wait for the device. TORCH_FR_BUFFER_SIZE sets the number of collectives that are recorded.
    """
    return None if _DUMP is None else bytes(_DUMP(True, False, False))
