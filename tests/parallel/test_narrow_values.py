"""Models whose values have half as many channels as their keys train the same under every layout."""

import functools

import pytest

from megatron.config.rules.check import check
from megatron.tooling.layout_parity import assemble, compare
from megatron.tooling.layouts import ParityLayout, under
from tests import pool
from tests.parallel.test_layout_parity import LIMIT
from tests.parallel.test_layout_parity_pp_cp import LAYERS, measured, small
from tests.unit.narrow_values import narrow_values

LAYOUTS = [
    ParityLayout(2, 1, True),
    ParityLayout(1, 1, cp=2, comm_type="p2p"),
    ParityLayout(1, 1, cp=2, comm_type="all_gather"),
    ParityLayout(1, 1, cp=2, comm_type="a2a"),
    ParityLayout(1, 1, cp=4, comm_type="a2a+p2p"),
    ParityLayout(1, 1, False, 2, "1f1b"),
    ParityLayout(2, 1, True, 2, "zb-v", cp=2, comm_type="all_gather"),
]
STEPS = 3


def narrow(rank, size, run, layout):
    with narrow_values():
        return measured(rank, size, run, layout)


@functools.cache
def alone(layers):
    return assemble(pool.run(1, narrow, small("llama", 4, STEPS, layers), ParityLayout(1, 1)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_is_that_of_one_process(layout):
    layers = LAYERS[layout.pp > 1]
    run = small("llama", 4, STEPS, layers)
    check(under(run, layout), layout.world_size)
    difference = compare(alone(layers), assemble(pool.run(layout.world_size, narrow, run, layout)))
    assert difference.loss <= LIMIT, f"losses differ by {difference.loss:.1e}"
    assert difference.gradient <= LIMIT, f"{difference.parameter} differs by {difference.gradient:.1e}"
