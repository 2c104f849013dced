import dataclasses
import logging
from pathlib import Path

import pytest

from megatron.base.errors import CheckpointError
from megatron.training.checkpoint import find_checkpoint
from megatron.training.saved_model import check_same_model, model_config_of
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


ROTARY = dataclasses.replace(MODEL, position_embedding_type="rope")
LONGROPE = dataclasses.replace(
    MODEL,
    position_embedding_type="longrope",
    short_factor=",".join(["1"] * (MODEL.head_dim // 2)),
    long_factor=",".join(["2"] * (MODEL.head_dim // 2)),
    rope_scaling_original_max_position_embeddings=32,
)


def differ(saved=MODEL, override=(), **changes):
    check_same_model(PATH, saved, dataclasses.replace(saved, **changes), override)


def test_the_same_size_given_and_derived_is_the_same_model():
    differ(kv_channels=MODEL.head_dim, ffn_hidden_size=MODEL.ffn_dim)


def test_the_same_windows_written_in_two_ways_are_the_same_model():
    there = dataclasses.replace(MODEL, window_size="7,0", window_attn_skip_freq="2")
    here = dataclasses.replace(MODEL, window_size="(7,0)", window_attn_skip_freq="[1,0]")
    check_same_model(PATH, there, here, ())
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


# Numbers that change the function that the model computes, and the shape of no tensor.
FUNCTIONS = [
    (MODEL, {"norm_epsilon": 1e-3}),
    (MODEL, {"softmax_scale": 0.5}),
    (MODEL, {"attn_logit_softcapping": 50.0}),
    (MODEL, {"final_logit_softcapping": 30.0}),
    (MODEL, {"mask_padded_vocabulary": False}),
    (MODEL, {"window_size": "7,0"}),
    (ROTARY, {"rotary_base": 500000.0}),
    (ROTARY, {"rotary_seq_len_interpolation_factor": 2.0}),
    (ROTARY, {"dynamic_ntk_factor": 2.0}),
    (ROTARY, {"use_rope_scaling": True}),
    (ROTARY, {"position_embedding_type": "yarn"}),
    *(
        (dataclasses.replace(ROTARY, use_rope_scaling=True), {f"rope_scaling_{name}": 3})
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    ),
    *(
        (dataclasses.replace(ROTARY, position_embedding_type="yarn"), {f"yarn_{name}": 2.0})
        for name in ("beta_fast", "beta_slow", "mscale")
    ),
    (LONGROPE, {"short_factor": LONGROPE.long_factor}),
    (LONGROPE, {"long_factor": LONGROPE.short_factor}),
    (LONGROPE, {"longrope_mscale": 1.5}),
    (LONGROPE, {"max_position_embeddings": 128}),
]


@pytest.mark.parametrize(("saved", "changes"), FUNCTIONS, ids=lambda value: value if isinstance(value, str) else None)
def test_a_number_that_changes_the_function_and_no_shape_is_refused_unless_it_is_named(
    saved, changes, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    ((name, value),) = changes.items()
    with pytest.raises(CheckpointError, match=f"--override-model-fields {name}$"):
        differ(saved, **changes)
    with pytest.raises(CheckpointError, match="another model"):
        differ(saved, override=("norm_epsilon" if name != "norm_epsilon" else "rotary_base",), **changes)
    differ(saved, override=(name,), **changes)
    assert f"{name}: {getattr(saved, name)} in the checkpoint, {value} in this run" in caplog.text
    caplog.clear()
    differ(saved, override=(name,))  # the same command once it has saved the changed model
    assert not caplog.text


def test_an_override_changes_no_tensor():
    with pytest.raises(CheckpointError, match="position_embedding_type is learned_absolute there and rope here"):
        differ(override=("position_embedding_type",), position_embedding_type="rope")
    with pytest.raises(CheckpointError, match="max_position_embeddings is 64 there and 128 here"):
        differ(override=("max_position_embeddings",), max_position_embeddings=128)


def test_only_what_makes_another_model_is_named():
    with pytest.raises(CheckpointError) as caught:
        differ(ROTARY, norm_epsilon=1e-3, max_position_embeddings=128, rope_scaling_factor=2.0)
    assert "norm_epsilon" in str(caught.value)
    assert "max_position" not in str(caught.value) and "rope_scaling" not in str(caught.value)


def test_a_hugging_face_folder_is_no_fresh_start(tmp_path):
    assert find_checkpoint(str(tmp_path), None, required=False) is None
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds a Hugging Face model; give it with --load-hf"):
        find_checkpoint(str(tmp_path), None, required=False)
