"""Layouts whose layers a profile measures."""

import dataclasses

import pytest

from megatron.base.errors import ConfigError
from megatron.tooling.plan.run import settings_of
from megatron.tooling.profile.layers import layouts

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --micro-batch-size 2 "
    "--global-batch-size 2 --train-iters 1 --tokenizer-type NullTokenizer --mock-data --lr 1e-3 --device cpu"
)


@pytest.fixture
def model_run():
    """A small dense run."""
    return settings_of(FLAGS.split(), 1, description="A run.")[0]


def test_the_first_layout_is_that_of_one_rank(model_run):
    found = layouts(model_run, [2, 4], [2], [2, 4])
    assert (found[0].tp, found[0].cp, found[0].micro_batch) == (1, 1, 2)
    assert any(layout.tp == 4 for layout in found) and any(layout.cp == 2 for layout in found)


def test_layouts_that_the_rules_refuse_are_left_out(model_run):
    assert not any(layout.tp == 8 for layout in layouts(model_run, [8], [1], [2]))


def test_a_layer_that_one_rank_cannot_hold_is_refused_with_the_rule_that_it_breaks(model_run):
    broken = dataclasses.replace(model_run, model=dataclasses.replace(model_run.model, num_attention_heads=3))
    with pytest.raises(
        ConfigError, match="on one rank, where --hidden-size 32 is not a multiple of --num-attention-heads 3"
    ):
        layouts(broken, [1], [1], [2])
