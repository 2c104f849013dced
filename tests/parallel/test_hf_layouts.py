"""A Hugging Face model loaded, saved and written back by 1, 2 and 4 ranks: the same bytes."""

import dataclasses
import itertools

import pytest
import torch
from safetensors.torch import load_file

from megatron.config.data import TokenizerConfig
from megatron.config.rules.check import check
from megatron.conversion.convert import to_checkpoint
from megatron.core.models.hf.families import read_config
from megatron.core.models.hf.source import HFSource
from megatron.training.checkpoint import save_checkpoint
from megatron.training.export import save_hf
from megatron.training.setup import build
from megatron.training.start import take_shape_from_files
from tests import pool
from tests.unit.config.runs import make_run
from tests.unit.models.builds import CPU, make_ids
from tests.unit.models.hf_models import load_quietly, save_published
from tests.unit.models.test_hf_predictions import with_predictions

DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}  # a run has its own, and says so in config.json
# Grouped heads, biases of heads that tp ranks share, tied embeddings, normalised wide heads; an odd vocabulary each.
NAMES = ["Yi 6B", "Qwen2 0.5B", "Qwen1.5 0.5B", "Qwen3 32B"]


def through(rank, size, fields, root):
    """Begin a run at tp = size as pretrain_gpt.py does, save it before its first step; the folder for transformers."""
    layout = {"tensor_model_parallel_size": size, "sequence_parallel": size > 1}
    run = take_shape_from_files(
        make_run(**fields, **layout, **DROPOUT, save=f"{root}/run", save_interval=100, save_hf=f"{root}/hf")
    )
    check(run, size)
    trainer = build(run, pool.groups(tp=size), CPU)
    return save_hf(trainer, save_checkpoint(trainer))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8)), key


# What a model has and the type of its elements do not depend on each other, so each comes with one of the other.
QUICK = ("Yi 6B", torch.bfloat16), ("Qwen2 0.5B", torch.float32), ("Qwen1.5 0.5B", torch.bfloat16)
QUICK += (("Qwen3 32B", torch.float32),)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(*each, marks=[] if each in QUICK else pytest.mark.slow)
        for each in itertools.product(NAMES, (torch.float32, torch.bfloat16))
    ],
    ids=str,
)
def test_through_any_number_of_ranks(tmp_path, name, dtype, caplog):
    """From a converted checkpoint and with --load-hf; each number of ranks also reads what the one before it saved."""
    model, tensors = save_published(name, tmp_path / "hf", dtype)
    source = HFSource(tmp_path / "hf")
    to_checkpoint(source, tmp_path / "ours", dtype=dtype, tokenizer=TokenizerConfig())
    bf16, before = {"bf16": dtype == torch.bfloat16}, str(tmp_path / "ours")
    for size in (1, 2, 4):
        root = tmp_path / f"tp {size}"
        for start, fields in (
            ("from hf", {"load_hf": str(tmp_path / "hf")}),
            ("from ours", {"load": before, "use_checkpoint_args": True}),
        ):
            folders = pool.run(size, through, {**fields, **bf16}, str(root / start))
            assert_same(load_file(folders[0] / "model.safetensors"), tensors)
        before = str(root / "from ours/run")
    tokens = make_ids(2, 40)[:, :-1]
    with torch.no_grad():
        assert torch.equal(load_quietly(folders[0], caplog)(tokens).logits, model(tokens).logits)
    (family, described), (expected_family, expected) = read_config(folders[0]), read_config(tmp_path / "hf")
    assert family == expected_family
    assert described == dataclasses.replace(expected, kv_channels=expected.head_dim)


def test_tensors_that_are_not_trained_pass_through_any_number_of_ranks(tmp_path):
    """Layers for prediction in a run without them: each number of ranks reads what the one before it saved."""
    with_predictions("glm 4.7 flash", tmp_path / "hf", 2, torch.bfloat16)
    tensors, fields = load_file(tmp_path / "hf/model.safetensors"), {"load_hf": str(tmp_path / "hf")}
    for size in (2, 1, 4):
        root = str(tmp_path / f"tp {size}")
        folders = pool.run(size, through, {**fields, "bf16": True}, root)
        assert_same(load_file(folders[0] / "model.safetensors"), tensors)
        fields = {"load": f"{root}/run", "use_checkpoint_args": True}
