"""Instruction tuning with a tokenizer that has no chat template: one from the data to the server."""

import json
import os
import runpy
import shutil

import pytest
import torch
from transformers import AutoTokenizer

from megatron.config.model import ModelConfig
from megatron.conversion.convert import to_checkpoint, to_hf
from megatron.core.datasets.chat_templates import CHAT_TEMPLATES
from megatron.core.inference.chat import open_template
from megatron.tooling.restore import read_saved, restore_tokenizer
from megatron.training.export import CheckpointSource
from megatron.training.vocabulary import with_vocabulary
from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import flags
from tests.unit.datasets.chat import messages
from tools.quickstart import save_tokenizer

DRIVER = "tests.e2e.helpers.drivers:finetune"
# A preset cut down: what stays of it is the vocabulary of Llama 2, 32,000 tokens.
CUT = ("--normalization", "--swiglu", "--position-embedding-type", "--disable-bias-linear", "--vocab-size")
PRESET = {"--preset": "llama2-7b", "--num-layers": 1, "--seq-length": 256}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder with what the run wrote; all paths are given relative to this process's folder."""
    folder = tmp_path_factory.mktemp("base")
    save_tokenizer(["the quick brown fox jumps over the lazy dog"] * 20, 300, folder / "tokenizer")
    pairs = [messages("the quick", "fox " * number) for number in range(1, 20)]
    (folder / "chat.jsonl").write_text(
        "".join(json.dumps({"messages": pair}) + "\n" for pair in [*pairs, pairs[0][:1]])
    )
    relative = os.path.relpath(folder)
    tokenizer = {"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": f"{relative}/tokenizer"}
    own = {"--input": f"{relative}/chat.jsonl", "--output-prefix": f"{relative}/chat", "--workers": 1}
    words = [str(word) for pair in {**own, **tokenizer, "--on-error": "skip"}.items() for word in pair]
    preprocess = runpy.run_path("tools/preprocess_sft.py")["main"]
    assert preprocess(words) == 2, "the tokenizer has no template of its own"
    assert preprocess([*words, "--chat-template", "chatml"]) == 0
    given = {"--data-path": f"{relative}/chat", "--split": "1,0,0", "--save": f"{relative}/run", "--save-interval": 2}
    saved = {"--save-hf": f"{relative}/hf", "--train-iters": 2, "--data-cache-path": f"{relative}/cache"}
    done = run(flags(PRESET, tokenizer, given, saved, without=CUT), folder / "log", driver=DRIVER)
    assert done.codes == [0], done.text
    return folder, done.stdout[0]


def test_the_template_of_the_data_goes_with_the_model(tuned, tmp_path, monkeypatch):
    folder, _ = tuned
    monkeypatch.chdir(tmp_path)
    saved = read_saved(str(folder / "run"), None)
    assert saved.tokenizer.tokenizer_model == str(folder / "tokenizer")
    prompt = open_template(restore_tokenizer(saved)).render(messages("the quick"))
    assert prompt == "<|im_start|>user\nthe quick<|endoftext|>\n<|im_start|>assistant\n"
    exported = AutoTokenizer.from_pretrained(folder / "hf" / "iter_0000002")
    assert exported.chat_template == CHAT_TEMPLATES["chatml"]


def test_and_through_conversions(tuned, tmp_path, monkeypatch):
    folder, _ = tuned
    monkeypatch.chdir(tmp_path)
    source = CheckpointSource(folder / "run" / "iter_0000002")
    to_checkpoint(source, tmp_path.relative_to(tmp_path) / "again", dtype=torch.float32, tokenizer=source.tokenizer)
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    again = CheckpointSource(tmp_path / "again" / "iter_0000000")
    assert again.tokenizer.tokenizer_model == str(tmp_path / "again" / "tokenizer")
    to_hf(again, tmp_path / "hf", dtype=torch.float32, tokenizer=again.tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template == CHAT_TEMPLATES["chatml"]


def test_a_preset_takes_the_tokenizers_vocabulary(tuned):
    folder, output = tuned
    model = read_saved(str(folder / "run"), None).model
    size = len(AutoTokenizer.from_pretrained(folder / "tokenizer"))
    assert (model.vocab_size, model.padded_vocab_size) == (size, -(-size // 16) * 16) and size < 300
    assert f"vocabulary: {size} tokens (of the tokenizer), padded to {model.padded_vocab_size};" in output


def test_a_run_that_goes_on_keeps_its_vocabulary(tuned):
    checkpoint = tuned[0] / "run" / "iter_0000002"
    size = read_saved(str(tuned[0] / "run"), None).model.vocab_size
    ours = {"tokenizer_vocab_size": 258, "seq_length": None, "tp": 1}
    assert with_vocabulary(ModelConfig(), (), checkpoint, **ours).vocab_size == size > 258
    assert with_vocabulary(ModelConfig(), (), None, **ours).vocab_size == 258


def test_another_template_than_the_datas_is_refused(tuned, tmp_path):
    folder, _ = tuned
    shutil.copytree(folder / "tokenizer", tmp_path / "tokenizer")
    tokenizer = {"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": tmp_path / "tokenizer"}
    given = {"--data-path": folder / "chat", "--chat-template": "{{ messages }}", "--data-cache-path": tmp_path}
    done = run(flags(PRESET, tokenizer, given, without=CUT), tmp_path / "log", driver=DRIVER)
    assert done.codes == [2], done.text
    assert "error: conversations in different chat templates: --chat-template and " in done.stderr[0]
