"""What lies beside the weights of a Hugging Face folder goes along: code, templates, generation settings, token ids."""

import json
import logging

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from megatron.config.data import TokenizerConfig
from megatron.conversion.convert import to_hf
from megatron.core.models.hf.side_files import side_files, side_folder, stop_ids
from megatron.core.models.hf.source import HFSource
from megatron.tooling.restore import read_hf, read_saved
from megatron.training.export import beside_weights
from tests.unit.conversion.test_convert import WORDS
from tests.unit.datasets.test_tokenizer import bpe, build, sentencepiece_model, tiktoken_file
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
    files = side_files(TokenizerConfig(**config), str(tmp_path / "hf"))
    assert carried == (files.get("generation_config.json") == tmp_path / "hf/generation_config.json")


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


def export(folder, base=None, **tokenizer):
    """The names of the files of a model with such a tokenizer."""
    config = TokenizerConfig(**{name: str(value) for name, value in tokenizer.items()})
    to_hf(HFSource(folder / "hf"), folder / "out", dtype=torch.float32, tokenizer=config, base=base and str(base))
    return {path.name for path in (folder / "out").iterdir()}


TEXTS = ["the quick fox", "a b  c", "then, more\nlines"]


def test_a_sentencepiece_tokenizer_goes_along(tmp_path):
    save_hf_model("llama", tmp_path / "hf")
    path = sentencepiece_model(tmp_path / "own.model", remove_extra_whitespaces=False)  # as LLaMA's
    assert "tokenizer.model" in export(tmp_path, tokenizer_type="SentencePieceTokenizer", tokenizer_model=path)
    theirs, ours = (
        AutoTokenizer.from_pretrained(tmp_path / "out"),
        build("SentencePieceTokenizer", tokenizer_model=path),
    )
    assert [theirs.encode(text) for text in TEXTS[:2]] == ours.encode_batch(TEXTS[:2])
    assert theirs.eos_token_id == ours.eod


def test_a_vocabulary_and_merges_go_along(tmp_path):
    save_hf_model("llama", tmp_path / "hf")
    bpe(["<|endoftext|>"]).model.save(str(tmp_path), "gpt2")
    files = {"vocab_file": tmp_path / "gpt2-vocab.json", "merge_file": tmp_path / "gpt2-merges.txt"}
    names = export(tmp_path, tokenizer_type="GPT2BPETokenizer", **files)
    assert {"vocab.json", "merges.txt", "tokenizer_config.json"} <= names
    ours = build("GPT2BPETokenizer", **{name: str(path) for name, path in files.items()})
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [theirs.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]
    assert theirs.eos_token_id == ours.eod


def test_a_tokenizer_that_transformers_does_not_read_is_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    caplog.set_level(logging.INFO, "megatron")
    path = tiktoken_file(tmp_path / "own.json")
    tokenizer = TokenizerConfig(tokenizer_type="TikTokenizer", tokenizer_model=path)
    assert beside_weights(tokenizer, None, tmp_path / "out") == ({"own.json": tmp_path / "own.json"}, {})
    assert "out gets no tokenizer that transformers reads: it is TikTokenizer" in caplog.text


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_card_and_the_license_of_the_model_go_along(tmp_path, elsewhere):
    save_hf_model("llama", tmp_path / "hf")
    write_tokenizer(tmp_path / "hf")
    names = {"README.md", "LICENSE", "LICENSE.txt", "NOTICE", "USE_POLICY.md"}
    for name in names:
        (tmp_path / "hf" / name).write_text(f"{name} of the base")
    (tmp_path / "hf/notes.txt").write_text("mine")
    tokenizer = tmp_path / "hf"
    if elsewhere:
        tokenizer = tmp_path / "tokenizer"
        tokenizer.mkdir()
        write_tokenizer(tokenizer)
        (tokenizer / "LICENSE").write_text("of the tokenizer")
    found = export(tmp_path, tmp_path / "hf", tokenizer_type="HuggingFaceTokenizer", tokenizer_model=tokenizer)
    assert names <= found and "notes.txt" not in found
    assert (tmp_path / "out/LICENSE").read_text() == "LICENSE of the base"


def test_the_card_and_the_license_survive_a_checkpoint(tmp_path):
    save_hf_model("llama", tmp_path / "hf")
    write_tokenizer(tmp_path / "hf")
    (tmp_path / "hf/LICENSE").write_text("of the base")
    assert (there_and_back(tmp_path) / "LICENSE").read_text() == "of the base"


def test_stop_ids_that_stand_in_config_json_alone(tmp_path):
    folder = tmp_path / "hf"
    save_hf_model("llama", folder)
    edit_json(folder / "config.json", eos_token_id=[2, 7])
    (folder / "generation_config.json").unlink()
    write_tokenizer(folder)
    (folder / "tokenizer.model").touch()
    assert stop_ids(read_hf(str(folder)).tokenizer) == [2, 7]
    run("hf", "megatron", folder, tmp_path / "ours")
    saved = read_saved(str(tmp_path / "ours"), None)
    assert stop_ids(saved.tokenizer, saved.base) == [2, 7]
    # A run with --load-hf, whose tokenizer is one file of that folder or none at all.
    for model in (str(folder / "tokenizer.model"), None):
        tokenizer = TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model)
        assert stop_ids(tokenizer, str(folder)) == [2, 7]
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert stop_ids(read_hf(str(folder)).tokenizer) == [9]
    (folder / "generation_config.json").write_text('{"temperature": 1.0}')
    assert stop_ids(read_hf(str(folder)).tokenizer) == [2, 7]


def test_a_link_out_of_the_folder_is_not_copied(tmp_path, capsys):
    save_hf_model("llama", tmp_path / "hf")
    write_tokenizer(tmp_path / "hf")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/key.jinja").write_text("secret")
    (tmp_path / "hf/generation_config.json").unlink()
    for name in ("merges.txt", "LICENSE", "generation_config.json"):
        (tmp_path / "hf" / name).symlink_to(tmp_path / "secrets/key.jinja")
    (tmp_path / "hf/additional_chat_templates").symlink_to(tmp_path / "secrets")
    (tmp_path / "hf/vocab.txt").symlink_to("tokenizer_config.json")  # its own file by another name
    run("hf", "megatron", tmp_path / "hf", tmp_path / "ours")
    back = run("megatron", "hf", tmp_path / "ours", tmp_path / "back")
    for folder in (tmp_path / "ours", back):
        assert not [path for path in folder.rglob("*") if path.is_file() and path.read_bytes() == b"secret"]
        assert list(folder.rglob("vocab.txt")) and not [path for path in folder.rglob("*") if path.is_symlink()]
    assert f"LICENSE is a symbolic link to {tmp_path}/secrets/key.jinja and is not copied" in "".join(
        capsys.readouterr()
    )


def test_the_links_of_the_cache_of_hugging_face_are_copied(tmp_path):
    blobs, snapshot = tmp_path / "hub/blobs", tmp_path / "hub/snapshots/1a2b"
    save_hf_model("llama", snapshot)
    write_tokenizer(snapshot)
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    run("hf", "megatron", snapshot, tmp_path / "ours")
    assert (tmp_path / "ours/tokenizer/tokenizer.json").is_file()


def test_links_where_the_files_are_written(tmp_path):
    save_hf_model("llama", tmp_path / "hf")
    write_tokenizer(tmp_path / "hf")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/file").write_text("theirs")
    (tmp_path / "ours/tokenizer").mkdir(parents=True)
    (tmp_path / "ours/tokenizer/tokenizer.json").symlink_to(tmp_path / "theirs/file")
    run("hf", "megatron", tmp_path / "hf", tmp_path / "ours")
    assert (tmp_path / "theirs/file").read_text() == "theirs"
    assert not (tmp_path / "ours/tokenizer/tokenizer.json").is_symlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/tokenizer").symlink_to(tmp_path / "theirs")
    words = ["--loader", "hf", "--saver", "megatron", "--load-dir", str(tmp_path / "hf")]
    assert convert.main([*words, "--save-dir", str(tmp_path / "other")]) == 2
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["file"]
