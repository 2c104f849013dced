"""Files beside the weights in a Hugging Face folder: the tokenizer's, and the settings of generation."""

from __future__ import annotations

from pathlib import Path

from megatron.config.data import TokenizerConfig

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_OTHERS = (
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def side_files(tokenizer: TokenizerConfig) -> list[Path]:
    """The files of a tokenizer's folder that belong beside a Hugging Face model; none when it is no folder."""
    folder = Path(tokenizer.tokenizer_model) if tokenizer.tokenizer_model else None
    if folder is None or not folder.is_dir():
        return []
    return [folder / name for name in (*_TOKENIZERS, *_OTHERS) if (folder / name).is_file()]


def tokenizer_of(folder: Path) -> TokenizerConfig:
    """The tokenizer in a Hugging Face folder; one without a type when it holds none."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return TokenizerConfig()
    return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
