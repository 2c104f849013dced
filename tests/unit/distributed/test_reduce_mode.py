"""What --grad-reduce-mode auto takes, and what it says about it."""

import pytest

from megatron.config.data_parallel import EVERY, LAST
from megatron.core.distributed.reduce_mode import ReduceProfile, choose_mode

MIB = 1024**2
ROOM = ReduceProfile(
    gradient_bytes=400 * MIB, extra_bytes=300 * MIB, reduce_seconds=2.0, backward_seconds=0.5, headroom_bytes=300 * MIB
)
FULL = ReduceProfile(
    gradient_bytes=400 * MIB, extra_bytes=300 * MIB, reduce_seconds=2.0, backward_seconds=0.5, headroom_bytes=299 * MIB
)


@pytest.mark.parametrize(("measured", "mode"), [(ROOM, LAST), (FULL, EVERY)])
def test_once_a_step_if_the_gradient_fits(measured, mode):
    found, why = choose_mode(8, measured)
    assert found == mode
    for number in (
        "8 microbatches",
        "400 MiB",
        "2.000 s (210 MB/s)",
        "backward 0.500 s",
        "1.500 s per step",
        "12.000 s",
    ):
        assert number in why
    assert "300 MiB more" in why and f"{measured.headroom_bytes // MIB} MiB free" in why


def test_one_microbatch():
    """The same rule and grammar: the number may change later in a run, the mode does not."""
    mode, why = choose_mode(1, ROOM)
    assert mode == LAST and why.startswith("1 microbatch; ")
