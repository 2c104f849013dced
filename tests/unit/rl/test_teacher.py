"""Teachers that cannot rate the tokens of a policy are refused in one line."""

import pytest

from megatron.base.errors import ConfigError, DataError
from megatron.core.datasets.tokenizer import NullTokenizer
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from megatron.rl.teacher import check_same_tokens, open_teacher
from tests.parallel.rl_runs import make_trainer
from tests.unit.inference.serving import write_tokenizer
from tests.unit.models.hf_models import save_hf_model


def policy_tokenizer(folder, *extra):
    """A tokenizer with further tokens."""
    library = HuggingFaceTokenizer(write_tokenizer(folder)).library
    library.add_tokens(list(extra))
    library.save_pretrained(folder)
    return HuggingFaceTokenizer(str(folder))


def test_a_teacher_may_know_more_tokens(tmp_path):
    policy = policy_tokenizer(tmp_path / "policy")
    policy_tokenizer(tmp_path / "same")
    policy_tokenizer(tmp_path / "more", "<think>", "<tool>")
    check_same_tokens(str(tmp_path / "same"), policy)
    check_same_tokens(str(tmp_path / "more"), policy)


def test_other_tokens_are_named(tmp_path):
    policy = policy_tokenizer(tmp_path / "policy", "<think>")
    policy_tokenizer(tmp_path / "without")
    policy_tokenizer(tmp_path / "moved", "<tool>", "<think>")
    for folder, number in (("without", "no token"), ("moved", "261")):
        with pytest.raises(
            DataError, match=rf"1 of 261 tokens differ, such as '<think>', which is 260 .* {number} there"
        ):
            check_same_tokens(str(tmp_path / folder), policy)


def test_tokenizers_that_cannot_be_compared_are_mentioned(tmp_path, caplog):
    check_same_tokens(str(tmp_path), NullTokenizer(64))
    assert "its tokenizer is not compared" in caplog.text


def test_a_teacher_with_fewer_tokens_is_refused(tmp_path):
    save_hf_model("llama", tmp_path)
    trainer, tokenizer = make_trainer(1, "--vocab-size 104")
    with pytest.raises(ConfigError, match="has 99 tokens, and the policy 104"):
        open_teacher(str(tmp_path), trainer, tokenizer)
