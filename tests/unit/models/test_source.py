"""Weights of another model are refused by name, before any of them is read."""

import pytest

from megatron.base.errors import CheckpointError
from megatron.core.models.source import fill
from megatron.core.parameter import local_parameters
from tests import pool
from tests.unit.models.builds import GPT, LLAMA, make_model


class Weights:
    """Those of a model, whose elements nobody may ask for."""

    def __init__(self, model):
        self.shapes = {name: each.info.spec.shape for name, each in local_parameters(model).items()}

    def read(self, name, box, dtype):
        raise AssertionError("an element was read")


@pytest.mark.parametrize("other", [GPT, {**LLAMA, "hidden_size": 2 * LLAMA["hidden_size"]}])
def test_the_weights_of_another_family_or_size(other):
    source = Weights(make_model(other, pool.groups()))
    with pytest.raises(CheckpointError, match=r"the weights are of another model: [a-z0-9_.]+ is "):
        fill(local_parameters(make_model(LLAMA, pool.groups())), source)
