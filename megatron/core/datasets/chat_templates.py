"""Chat templates that are not part of a tokenizer: a built-in one, one from a file, or one given as text."""

from __future__ import annotations

from pathlib import Path

from megatron.base.errors import ConfigError

# ChatML (https://github.com/openai/openai-python/blob/release-v0.28.0/chatml.md) with two changes, so that it suits a
# tokenizer that was not made for it: a conversation begins with the tokenizer's bos if it has one, as base models are
# trained, and a turn ends with its eos, so that every program stops there. The result is ChatML if <|im_end|> is the
# eos. <|im_start|> need not be a single token.
_CHATML = (
    "{{ bos_token | default('', true) }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT_TEMPLATES = {"chatml": _CHATML}


def read_chat_template(word: str) -> str:
    """Returns the text of a template: `word` is a name in CHAT_TEMPLATES, a file, or the text itself. Raises
    ConfigError.
    """
    if word in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[word]
    if "{{" in word or "{%" in word:  # checkpoints store the text itself
        return word
    try:
        return Path(word).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--chat-template {word} cannot be read ({error}); give {', '.join(CHAT_TEMPLATES)} or a file with a Jinja "
            "template in UTF-8"
        ) from error
