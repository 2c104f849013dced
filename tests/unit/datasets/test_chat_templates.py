"""The template that is shipped, for tokenizers that have none, and how one is named."""

import dataclasses
import os

import pytest

from megatron.base.errors import ConfigError, DataError
from megatron.config.data import TokenizerConfig
from megatron.core.datasets.chat_templates import CHAT_TEMPLATES, read_chat_template
from megatron.core.datasets.sft import template_of, template_path
from megatron.core.datasets.sft_records import Conversation
from megatron.core.datasets.sft_template import SFTTemplate
from megatron.core.datasets.tokenizer import build_tokenizer, portable
from tests.unit.datasets.chat import CHATML, messages, tokenizer_folder
from tools.quickstart import save_tokenizer

TURNS = messages("the fox", "jumps over", "my box", "five dozen", system="quick")


def config_of(folder, template):
    return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder), chat_template=template)


def test_chatml_on_the_quickstarts_tokenizer_trains_answers_that_end_with_its_eos(tmp_path):
    save_tokenizer(["the quick brown fox"] * 20, 300, tmp_path)
    tokenizer = build_tokenizer(config_of(tmp_path, "chatml"), None)
    ids, trained = SFTTemplate(tokenizer).encode(Conversation(TURNS))
    answers = tokenizer.decode([token for token, is_trained in zip(ids, trained, strict=True) if is_trained])
    assert answers == "jumps over<|endoftext|>five dozen<|endoftext|>"
    assert [token for token, is_trained in zip(ids, trained, strict=True) if is_trained].count(tokenizer.eod) == 2
    assert tokenizer.decode(ids).startswith("<|im_start|>system\nquick<|endoftext|>\n<|im_start|>user\nthe fox<|end")


def test_chatml_is_the_published_one_where_im_end_is_the_eos(tmp_path):
    tokenizer = build_tokenizer(config_of(tokenizer_folder(tmp_path), None), None)
    tokenizer.library.eos_token, tokenizer.library.bos_token = "<|im_end|>", None
    for asks in (False, True):
        options = {"tokenize": False, "add_generation_prompt": asks}
        shipped, published = (
            tokenizer.library.apply_chat_template(TURNS, chat_template=template, **options)
            for template in (CHAT_TEMPLATES["chatml"], CHATML)
        )
        assert shipped == published


def test_chatml_begins_with_the_bos_that_a_base_model_is_used_to(tmp_path):
    tokenizer = build_tokenizer(config_of(tokenizer_folder(tmp_path), "chatml"), None)
    assert SFTTemplate(tokenizer).encode(Conversation(TURNS))[0][0] == tokenizer.bos


def test_a_template_is_named_or_a_file_or_its_text(tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    for word in (str(tmp_path / "own.jinja"), "{{ messages }}"):
        assert read_chat_template(word) == "{{ messages }}"
    for word in ("chat-ml", str(tmp_path)):
        with pytest.raises(ConfigError, match=rf"--chat-template {word} cannot be read .*; give chatml or a file"):
            read_chat_template(word)


def test_other_tokenizers_render_none():
    config = TokenizerConfig(tokenizer_type="NullTokenizer", chat_template="chatml")
    with pytest.raises(ConfigError, match=r"--chat-template is rendered by .*HuggingFaceTokenizer, and it is NullTok"):
        build_tokenizer(config, 9)


def test_what_is_stored_is_found_from_any_folder(tmp_path, monkeypatch):
    tokenizer_folder(tmp_path / "tokenizer")
    (tmp_path / "own.jinja").write_text("[{{ messages }}]")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    stored = portable(config_of("tokenizer", "own.jinja"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert stored == config_of(tmp_path / "tokenizer", "[{{ messages }}]") and portable(stored) == stored
    assert build_tokenizer(stored, None).given_template == "[{{ messages }}]"
    plain = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file="v", merge_file="m")
    here = os.getcwd()
    assert portable(plain) == dataclasses.replace(plain, vocab_file=f"{here}/v", merge_file=f"{here}/m")


def test_the_template_of_datasets(tmp_path):
    one, same, other, own = (str(tmp_path / name) for name in ("one", "same", "other", "own"))
    for prefix, text in ((one, "{{ 1 }}"), (same, "{{ 1 }}"), (other, "{{ 2 }}")):
        template_path(prefix).write_text(text)
    assert template_of([one, same], None) == template_of([one], "{{ 1 }}") == "{{ 1 }}"
    assert template_of([own], None) is None and template_of([own], "{{ 3 }}") == "{{ 3 }}"
    for prefixes, given, says in (
        ([one, other], None, r"one\.jinja and .*other\.jinja; a model learns one"),
        ([one, own], None, r"one\.jinja and .*own \(the tokenizer's own\)"),
        ([one, own], "{{ 2 }}", r"--chat-template and .*one\.jinja"),
    ):
        with pytest.raises(DataError, match=f"conversations in different chat templates: .*{says}"):
            template_of(prefixes, given)
