"""Whatever the order of asynchronous work, as long as it is one that is promised: the same bits, and no race."""

import dataclasses
import functools

import pytest

from tests import pool
from tests.adversary.runs import configured, trained
from tests.adversary.runtime import LATE, SHUFFLED
from tests.same_numbers import CASES

# One of each kind of asynchronous work, and of what is combined with it.
QUICK = (
    "full uniform",
    "cpu offload",
    "dp optim_grads",
    "dp optim_grads_params",
    "dp every-microbatch, reduce in bf16",
    "dp weights and updates offloaded",
    "dp states offloaded",
    "tp sp optimizer chunks",
    "tp sp overlap",
    "pp zb-h1",
    "pp offload",
    "cp p2p",
    "cp all_gather",
    "cp a2a",
    "fp8 tp sp overlap",
)
# In random order, too: of each axis one, and an offload.
QUICK_SHUFFLED = ("cpu offload", "dp optim_grads_params", "tp sp overlap", "pp zb-h1", "cp p2p")
# An adapter needs a checkpoint to start from; "auto" places chunks by the time that updates take.
ALL = [name for name in CASES if "lora" not in name and "auto" not in name]


@functools.cache
def plain(name):
    world, run = configured(name)
    return pool.run(world, trained, run, None)


def cases():
    for name in ALL:
        for mode, quick in ((LATE, QUICK), (SHUFFLED, QUICK_SHUFFLED)):
            yield pytest.param(name, mode, marks=[] if name in quick else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "mode"), cases())
def test_same_bits(name, mode):
    world, run = configured(name)
    assert pool.run(world, trained, run, mode) == plain(name)


def test_a_step_that_is_computed_again():
    """Copies of its first gradients are on their way to the CPU's optimizer when the second are written."""
    world, run = configured("dp weights and updates offloaded")
    train = dataclasses.replace(run.train, error_injection_rate=3)
    again = pool.run(world, trained, dataclasses.replace(run, train=train), LATE)
    assert again == plain("dp weights and updates offloaded")
