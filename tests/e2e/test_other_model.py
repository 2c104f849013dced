"""Runs that begin with a model that they change: more tokens, a longer context, another precision."""

import itertools
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import SHAPE, flags, lines
from tests.unit.models.hf_models import save_hf_model
from tools.checkpoint import convert

SHAPE_FLAGS = set(SHAPE) - {"--attention-dropout", "--hidden-dropout"}
STEADY = {"--lr": 1e-12, "--train-iters": 1, "--log-interval": 1, "--mock-data": None, "--seed": 5}
TOKENS = 150
TP2 = {"--tensor-model-parallel-size": 2, "--sequence-parallel": None}
ZERO3 = {"--data-parallel-sharding-strategy": "optim_grads_params"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(a Hugging Face model of 99 tokens, whose softmax has 128 rows here; the same as a checkpoint of ours)"""
    folder = tmp_path_factory.mktemp("models")
    save_hf_model("qwen2", folder / "hf")
    words = [
        "--loader",
        "hf",
        "--saver",
        "megatron",
        "--load-dir",
        str(folder / "hf"),
        "--save-dir",
        str(folder / "ours"),
    ]
    assert convert.main(words) == 0
    return {"--load-hf": folder / "hf"}, {"--load": folder / "ours", "--finetune": None, "--use-checkpoint-args": None}


def first_loss(tmp_path, name, *changes, more=(), ranks=1):
    ended = run([*flags(STEADY, *changes, without=SHAPE_FLAGS), *map(str, more)], tmp_path / name, ranks)
    assert ended.codes == [0] * ranks, ended.text
    return lines(ended.stdout[0])[0]["lm loss"], ended.stdout[0]


def test_new_tokens_begin_as_the_mean_of_the_others(tmp_path, models):
    """From either format and under any layout; a checkpoint then holds them, and the run goes on with them."""
    hf, ours = models
    grown = ("--vocab-size", TOKENS)
    export = {"--save": tmp_path / "run", "--save-hf": tmp_path / "out", "--save-interval": 1}
    loss, _ = first_loss(tmp_path, "hf", hf, export, more=grown)
    assert first_loss(tmp_path, "tp", hf, TP2, more=grown, ranks=2)[0] == pytest.approx(loss, rel=1e-5)
    assert first_loss(tmp_path, "zero3", ours, ZERO3, more=grown, ranks=2)[0] == pytest.approx(loss, rel=1e-5)

    before = AutoModelForCausalLM.from_pretrained(hf["--load-hf"]).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out/iter_0000001").state_dict()
    for name, old in before.items():
        torch.testing.assert_close(after[name][: len(old)], old, msg=name)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old, new = before[name], after[name][len(before[name]) :]
        torch.testing.assert_close(new, old.mean(0).expand(TOKENS - len(old), -1))

    own = {"--load": tmp_path / "run", "--use-checkpoint-args": None, "--train-iters": 2}
    _, text = first_loss(tmp_path, "again", own, more=("--override-opt_param-scheduler",))
    assert f"vocabulary: {TOKENS} tokens (of the flags)" in text and "iteration        2/" in text


def test_weights_take_another_precision(tmp_path, models):
    hf, ours = models
    direct, _ = first_loss(tmp_path, "hf", hf, more=("--bf16",))
    converted, text = first_loss(tmp_path, "ours", ours, more=("--bf16",))
    assert converted == direct and "stored as float32, as bfloat16" in text


YARN = {
    "--position-embedding-type": "yarn",
    "--max-position-embeddings": 256,
    "--rope-scaling-factor": 2,
    "--rope-scaling-original-max-position-embeddings": 128,
}


def test_the_context_is_extended_with_yarn(tmp_path, models):
    """The loss is that of the same folder whose config.json asks for the same."""
    hf, ours = models
    folder = tmp_path / "extended"
    shutil.copytree(hf["--load-hf"], folder)
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    config |= {"rope_parameters": config["rope_parameters"] | rope, "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    longer = {"--seq-length": 256, "--micro-batch-size": 1, "--global-batch-size": 2}
    expected, _ = first_loss(tmp_path, "folder", {"--load-hf": folder}, longer)

    typed = [*itertools.chain(*YARN.items()), "--override-model-fields", *(name[2:].replace("-", "_") for name in YARN)]
    for name, base in (("hf", hf), ("ours", ours)):
        loss, text = first_loss(tmp_path, name, base, longer, more=typed)
        assert loss == expected and "position_embedding_type: rope in " in text
