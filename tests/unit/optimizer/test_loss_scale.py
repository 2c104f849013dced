"""The fp16 loss scale, step by step."""

import pytest
import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.core.optimizer.loss_scale import LossScale

CPU = torch.device("cpu")


def played(story, **fields):
    """Scale after each letter of `story`: o an overflow, . a good step."""
    scale = LossScale(OptimizerConfig(**fields), fp16=True, device=CPU)
    values = []
    for letter in story:
        scale.update(overflow=torch.tensor(letter == "o"))
        values.append(scale.value)
    return values


@pytest.mark.parametrize(
    ("story", "hysteresis", "window", "values"),
    [
        ("oo", 1, 10, [8, 4]),
        ("ooo", 2, 10, [16, 8, 4]),  # the first one is forgiven, those after it not
        ("o.o.o", 2, 10, [16, 16, 8, 8, 4]),  # good steps alone do not forgive ...
        ("o..oo", 2, 2, [16, 16, 32, 32, 16]),  # ... a whole window does
        ("....", 2, 2, [16, 32, 32, 64]),
        (".o..", 2, 2, [16, 16, 16, 32]),  # an overflow starts the window anew
        ("oooooo", 1, 10, [8, 4, 2, 1, 1, 1]),  # the floor
    ],
)
def test_table(story, hysteresis, window, values):
    assert played(story, initial_loss_scale=16.0, hysteresis=hysteresis, loss_scale_window=window) == values


def test_floor():
    assert played("ooo", initial_loss_scale=16.0, hysteresis=1, min_loss_scale=8.0) == [8, 8, 8]


def test_fixed():
    scale = LossScale(OptimizerConfig(loss_scale=128.0), fp16=True, device=CPU)
    scale.update(overflow=torch.tensor(True))
    scale.load_state({"value": 1.0, "good_steps": 0, "hysteresis": 0})
    assert (scale.value, scale.dynamic) == (128.0, False)


def test_without_fp16_it_is_one():
    scale = LossScale(OptimizerConfig(loss_scale=128.0), fp16=False, device=CPU)
    scale.update(overflow=torch.tensor(True))
    assert (scale.value, scale.dynamic) == (1.0, False)


def test_state_continues_the_story():
    config = OptimizerConfig(initial_loss_scale=16.0, loss_scale_window=3)
    story = "..o.o..."
    for cut in range(len(story)):
        first = LossScale(config, fp16=True, device=CPU)
        for letter in story[:cut]:
            first.update(torch.tensor(letter == "o"))
        second = LossScale(config, fp16=True, device=CPU)
        second.load_state(first.state())
        for letter in story[cut:]:
            second.update(torch.tensor(letter == "o"))
        whole = played(story, initial_loss_scale=16.0, loss_scale_window=3)
        assert second.value == whole[-1] == 16.0
