"""A checkpoint whose metadata.json was edited by hand, with a checksum that fits: one line, and no traceback."""

import copy
import json
from pathlib import Path

import pytest

from megatron.base.errors import CheckpointError
from megatron.training.export import saved_parts
from megatron.training.saved_model import model_config_of
from megatron.training.saved_run import check_state
from tests.unit.config.runs import make_run

PATH = Path("run/iter_0000010")
STATE = json.loads(
    json.dumps(
        {
            "format": 1,
            "config": make_run(lora_target_modules=("q_proj", "v_proj")).to_dict(),
            "train": {"iteration": 10, "consumed_samples": 20, "schedule_position": 10},
            "schedule": {"unit": "iterations"},
            "layout": {"tp": 1, "dp": 1},
            "grad_reduce_mode": None,
            "rng": {"device": "cpu"},
            "optimizer": {"steps": 10, "loss_scale": None},
            "fp8": None,
        }
    )
)


def read(state):
    check_state(PATH, state)
    saved_parts(state)


def changed(path, value):
    state = copy.deepcopy(STATE)
    *before, last = path
    held = state
    for name in before:
        held = held[name]
    held[last] = value
    return state


def test_what_a_run_saved_is_read():
    read(STATE)
    assert model_config_of(STATE).lora_target_modules == ("q_proj", "v_proj")
    read(changed(["config", "model", "a_field_of_another_version"], 1))
    read({**STATE, **dict.fromkeys(("train", "schedule", "layout", "rng", "optimizer"))})


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (["config"], [], "is not that of a run"),
        (["config", "model"], ["num_layers"], "the configuration of the model is no object"),
        (["config", "tokenizer"], "x", "the configuration of the tokenizer is no object"),
        (["config", "model", "num_layers"], 10**8, "num_layers is 100000000; it must be from 1 to 10000"),
        (["config", "model", "num_layers"], "two", "num_layers is 'two', not of type int"),
        (["config", "model", "num_layers"], True, "num_layers is True, not of type int"),
        (["config", "model", "norm_epsilon"], [1e-5], r"norm_epsilon is \(1e-05,\), not of type float"),
        (["config", "model", "swiglu"], 1, "swiglu is 1, not of type bool"),
        (
            ["config", "model", "normalization"],
            "BatchNorm",
            "normalization is 'BatchNorm'; it must be one of LayerNorm",
        ),
        (["config", "model", "lora_target_modules"], [1], "lora_target_modules is .*not of type tuple"),
        (["config", "tokenizer", "tokenizer_model"], {"a": 1}, "tokenizer_model is .*not of type str"),
        (["train"], [1], r"train is '\[1\]', no object"),
        (["train", "iteration"], "ten", "iteration is 'ten', not of type int"),
        (["train", "iteration"], None, "iteration is None, not of type int"),
        (["schedule"], None, "a run that has trained has a schedule"),
        (["schedule"], 5, "schedule is '5', no object"),
        (["layout"], {"dp": "one"}, "the layout consists of no sizes"),
        (["rng"], "cpu", "rng is 'cpu', no object"),
        (["optimizer"], {}, "it has no 'steps'"),
        (["optimizer", "steps"], "10", "the steps of the optimizer are no number"),
        (["fp8"], {"layers": 3}, "the FP8 layers are no list"),
        (["results"], 5, "the results are no object"),
        (["results"], {"steps": "x"}, "steps is 'x', not of type int"),
        (["results"], {"largest": [1.0]}, "are not three numbers"),
        (["results"], {"unresolved": {"iteration": 3}}, "missing 4 required"),
    ],
)
def test_an_edited_state_is_refused(path, value, problem):
    with pytest.raises(CheckpointError, match=problem) as caught:
        read(changed(path, value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("state", [None, [], "state", {}, {"config": {}}])
def test_no_state_at_all(state):
    with pytest.raises(CheckpointError, match="its state is not that of a run"):
        read(state)
