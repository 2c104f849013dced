"""Head and loss of some tokens at a time train as whole logits on one process do, under every layout."""

import dataclasses

import pytest

from megatron.config.rules.check import check
from megatron.tooling.layout_parity import assemble, compare
from megatron.tooling.layouts import ParityLayout, under
from tests import pool
from tests.parallel.test_layout_parity import LIMIT
from tests.parallel.test_layout_parity_pp_cp import LAYERS, measured, reference, small

SAMPLES, STEPS = 4, 3
ZERO2, ZERO3 = ({"data_parallel_sharding_strategy": name} for name in ("optim_grads", "optim_grads_params"))
OVERLAPPED = {"overlapped_distributed_optimizer": True}
CASES = [
    ("llama", ParityLayout(1, 1), {}),
    ("llama", ParityLayout(2, 1), {}),
    ("llama", ParityLayout(4, 1, True), {}),
    ("gpt", ParityLayout(2, 1, True), {}),
    ("gpt", ParityLayout(1, 2), ZERO2),
    ("gpt", ParityLayout(1, 2), ZERO3),
    ("llama", ParityLayout(2, 2, True), ZERO3),
    ("llama", ParityLayout(1, 2), OVERLAPPED),
    ("llama", ParityLayout(1, 1, cp=2, comm_type="p2p"), {}),
    ("gpt", ParityLayout(2, 1, True, cp=2, comm_type="a2a"), {}),
    ("gpt", ParityLayout(1, 1, False, 2, "gpipe"), {}),
    ("gpt", ParityLayout(1, 2, False, 2, "interleaved", 2), ZERO2),
    ("llama", ParityLayout(1, 1, False, 2, "zb-h1"), {}),
    ("gpt", ParityLayout(2, 2, True, 2, "zb-v"), OVERLAPPED),
    ("llama", ParityLayout(2, 1, True, 2, "1f1b"), {"tp_comm_overlap": True}),
]


@pytest.mark.parametrize(("model", "layout", "parallel"), CASES, ids=str)
def test_training_is_that_of_whole_logits(model, layout, parallel):
    layers = LAYERS[layout.pp > 1]
    run = small(model, SAMPLES, STEPS, layers, parallel)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, cross_entropy_chunk_size=6))
    check(under(run, layout), layout.world_size)
    difference = compare(
        reference(model, SAMPLES, STEPS, layers), assemble(pool.run(layout.world_size, measured, run, layout))
    )
    assert difference.loss <= LIMIT, f"losses differ by {difference.loss:.1e}"
    assert difference.gradient <= LIMIT, f"{difference.parameter} differs by {difference.gradient:.1e}"
