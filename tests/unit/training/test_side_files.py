"""What lies beside the weights of a Hugging Face folder goes along: code, templates, generation settings, token ids."""

import json

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from megatron.config.data import TokenizerConfig
from megatron.conversion.convert import to_hf
from megatron.core.models.hf.side_files import side_files, side_folder
from megatron.core.models.hf.source import HFSource
from tests.unit.conversion.test_convert import WORDS
from tests.unit.inference.serving import write_tokenizer
from tests.unit.models.hf_models import edit_json, save_hf_model
from tools.checkpoint import convert

CODE = """
from transformers import PreTrainedTokenizer
from .own_words import words


class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "own.tiktoken"}

    def __init__(self, vocab_file, **more):
        self.words = words(vocab_file)
        super().__init__(**more)

    @property
    def vocab_size(self):
        return len(self.words)

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}

    def _tokenize(self, text):
        return text.split()

    def _convert_token_to_id(self, token):
        return self.words.index(token)

    def _convert_id_to_token(self, index):
        return self.words[index]
"""
GENERATION = {"bos_token_id": 1, "eos_token_id": [2, 7], "temperature": 0.6, "do_sample": True}


def run(loader, saver, load, save):
    words = ["--loader", loader, "--saver", saver, "--load-dir", str(load), "--save-dir", str(save)]
    assert convert.main(words) == 0
    return save


def there_and_back(tmp_path):
    run("hf", "megatron", tmp_path / "hf", tmp_path / "ours")
    return run("megatron", "hf", tmp_path / "ours", tmp_path / "back")


def read(path):
    return json.loads(path.read_text())


def test_a_tokenizer_with_code_of_its_own(tmp_path):
    """Its code may be in several files, and its vocabulary under any of the usual names."""
    folder = tmp_path / "hf"
    save_hf_model("llama", folder)
    (folder / "tokenization_own.py").write_text(CODE)
    (folder / "own_words.py").write_text("def words(file):\n    return open(file).read().split()\n")
    (folder / "own.tiktoken").write_text("<s> </s> one two three")
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "</s>", "bos_token": "<s>"}))
    back = there_and_back(tmp_path)
    for place in (folder, tmp_path / "ours/tokenizer", back):
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=True)
        assert tokenizer.encode("three one", add_special_tokens=False) == [4, 2]


def test_code_that_no_file_calls_for_stays_where_it_is(tmp_path):
    save_hf_model("llama", tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").write_text(WORDS)
    (tmp_path / "hf/train.py").write_text("raise SystemExit")
    assert not list(there_and_back(tmp_path).glob("*.py"))


def test_all_chat_templates(tmp_path):
    save_hf_model("llama", tmp_path / "hf")
    write_tokenizer(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    tokenizer.chat_template = {
        "default": "{{ messages[0].content }}",
        "tool_use": "{{ tools }}",
        "rag": "{{ documents }}",
    }
    tokenizer.save_pretrained(tmp_path / "hf")
    assert (tmp_path / "hf/additional_chat_templates/tool_use.jinja").is_file()
    found = AutoTokenizer.from_pretrained(there_and_back(tmp_path))
    assert found.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_generation_settings_and_token_ids(tmp_path, with_tokenizer):
    save_hf_model("llama", tmp_path / "hf")
    edit_json(tmp_path / "hf/config.json", eos_token_id=[2, 7], pad_token_id=3)
    (tmp_path / "hf/generation_config.json").write_text(json.dumps(GENERATION))
    if with_tokenizer:
        (tmp_path / "hf/tokenizer.json").write_text(WORDS)
    back = there_and_back(tmp_path)
    config = read(back / "config.json")
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, [2, 7], 3)
    assert read(back / "generation_config.json") == GENERATION
    assert GenerationConfig.from_pretrained(back).temperature == 0.6


def test_token_ids_of_another_family_and_of_a_changed_model(tmp_path):
    """Where config.json cannot be taken over, the ids in it still are those of the tokenizer."""
    save_hf_model("llama", tmp_path / "hf")
    edit_json(tmp_path / "hf/config.json", eos_token_id=[2, 7])
    (tmp_path / "hf/tokenizer.json").write_text(WORDS)
    run("hf", "megatron", tmp_path / "hf", tmp_path / "ours")
    edit_json(tmp_path / "ours/tokenizer/config.json", max_position_embeddings=64)
    back = run("megatron", "hf", tmp_path / "ours", tmp_path / "back")
    config = read(back / "config.json")
    assert config["max_position_embeddings"] == 128 and config["eos_token_id"] == [2, 7]


@pytest.mark.parametrize(
    ("tokenizer", "carried"),
    [
        ({}, True),
        ({"tokenizer_type": "NullTokenizer"}, True),
        ({"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "{hf}/tokenizer.model"}, True),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "{hf}"}, True),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "{other}"}, False),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "{other}/vocab.json"}, False),
    ],
)
def test_a_run_that_began_with_a_model_keeps_what_lay_beside_it(tmp_path, tokenizer, carried):
    """Unless it has another tokenizer, to which those ids do not belong."""
    save_hf_model("llama", tmp_path / "hf")
    (tmp_path / "hf/generation_config.json").write_text(json.dumps(GENERATION))
    (tmp_path / "other").mkdir()
    config = {key: value.format(hf=tmp_path / "hf", other=tmp_path / "other") for key, value in tokenizer.items()}
    found = side_folder(TokenizerConfig(**config), str(tmp_path / "hf"))
    assert (found == tmp_path / "hf") == carried
    assert carried == (tmp_path / "hf/generation_config.json" in side_files(found))


@pytest.mark.parametrize(
    "content", [{"model_type": "gpt2", "eos_token_id": 9}, {"model_type": "llama", "hidden_size": 0}]
)
def test_a_tokenizer_beside_another_model_stops_no_export(tmp_path, content):
    save_hf_model("llama", tmp_path / "hf")
    (tmp_path / "other").mkdir()
    write_tokenizer(tmp_path / "other")
    (tmp_path / "other/config.json").write_text(json.dumps(content))
    tokenizer = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "other"))
    to_hf(HFSource(tmp_path / "hf"), tmp_path / "out", dtype=torch.float32, tokenizer=tokenizer)
    assert read(tmp_path / "out/config.json")["eos_token_id"] == content.get("eos_token_id", 257)
