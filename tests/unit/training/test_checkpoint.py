import dataclasses
from pathlib import Path

import pytest

from megatron.base.errors import CheckpointError
from megatron.training.checkpoint import check_same_model, model_config_of
from tests.unit.config.runs import make_run

PATH = Path("run/iter_0000010")
MODEL = dataclasses.replace(
    make_run().model,
    num_layers=2,
    hidden_size=96,
    num_attention_heads=4,
    vocab_size=500,
    add_bias_linear=True,
    max_position_embeddings=64,
)


def differ(finetune=False, **changes):
    check_same_model(PATH, MODEL, dataclasses.replace(MODEL, **changes), finetune=finetune)


def test_the_same_size_given_and_derived_is_the_same_model():
    differ(kv_channels=MODEL.head_dim, ffn_hidden_size=MODEL.ffn_dim)


def test_the_same_windows_written_in_two_ways_are_the_same_model():
    there = dataclasses.replace(MODEL, window_size="7,0", window_attn_skip_freq="2")
    here = dataclasses.replace(MODEL, window_size="(7,0)", window_attn_skip_freq="[1,0]")
    check_same_model(PATH, there, here, finetune=False)
    differ(window_size="-1,0", window_attn_skip_freq="[0]*2")


def test_what_runs_on_the_model_is_not_the_model():
    differ(attention_dropout=0.3, attention_backend="unfused", init_method_std=0.5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_layers": 3}, "num_layers is 2 there and 3 here"),
        ({"kv_channels": 8}, f"kv_channels is {MODEL.head_dim} there and 8 here"),
        ({"vocab_size": 501}, "vocab_size is 500 there and 501 here"),
        ({"add_bias_linear": False}, "add_bias_linear is True there and False here"),
        ({"bias_gelu_fusion": False}, "bias_gelu_fusion is True there and False here"),
        ({"window_size": "7,0"}, "window_size is None there and 8 here"),
        (
            {"window_size": "7,0", "window_attn_skip_freq": "2"},
            "window_attn_skip_freq is (None, None) there",
        ),
    ],
)
def test_another_model_is_refused_by_name(changes, named):
    with pytest.raises(CheckpointError, match="another model") as caught:
        differ(**changes)
    assert named in str(caught.value) and str(PATH) in str(caught.value)


def test_a_checkpoint_from_before_bias_gelu_fusion_keeps_its_exact_gelu():
    saved = dataclasses.asdict(MODEL)
    assert model_config_of({"config": {"model": saved}}).tanh_gelu
    del saved["bias_gelu_fusion"]
    assert not model_config_of({"config": {"model": saved}}).tanh_gelu
    assert model_config_of({"config": {"model": saved | {"openai_gelu": True}}}).tanh_gelu


def test_fine_tuning_may_change_the_rotary_base():
    rotary = dataclasses.replace(MODEL, position_embedding_type="rope")
    longer = dataclasses.replace(rotary, rotary_base=500000.0)
    check_same_model(PATH, rotary, longer, finetune=True)
    with pytest.raises(CheckpointError, match=r"rotary_base is 10000\.0 there and 500000\.0 here"):
        check_same_model(PATH, rotary, longer, finetune=False)
