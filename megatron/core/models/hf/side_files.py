"""Files other than weights in a Hugging Face folder: the tokenizer's, its templates and code, and generation settings."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config.data import TokenizerConfig
from megatron.core.models.hf.families import CONFIG_FILE

TEMPLATE_FILE = "chat_template.jinja"  # it overrides a template in tokenizer_config.json
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
# Tokenizers with custom code also have custom names for their vocabulary.
_PATTERNS = ["tokenizer*.json", "*.model", "*.tiktoken", "vocab.*", "merges.txt", "special_tokens_map.json"]
_PATTERNS += ["added_tokens.json", "chat_template.*", "generation_config.json"]
_TEMPLATES = "additional_chat_templates"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def side_folder(tokenizer: TokenizerConfig, base: str | None) -> Path | None:
    """Returns the Hugging Face folder whose files belong to a model with this tokenizer; None if there is none.

    `base` is the folder of the Hugging Face model that training began with. It is used unless the tokenizer is from
    elsewhere.
    """
    given = [Path(file) for file in (tokenizer.tokenizer_model, tokenizer.vocab_file) if file]
    if tokenizer.tokenizer_model and given[0].is_dir():
        return given[0]
    folder = Path(base) if base else None
    if folder is None or not folder.is_dir() or any(file.resolve().parent != folder.resolve() for file in given):
        return None
    return folder


def side_files(folder: Path | None) -> list[Path]:
    """Returns the files that belong to a model's weights, except config.json, and a folder of templates."""
    if folder is None:
        return []
    patterns = [*_PATTERNS, *(["*.py"] if _has_code(folder) else [])]
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    templates = folder / _TEMPLATES
    return sorted(found) + ([templates] if templates.is_dir() else [])


def copy_side_files(files: Sequence[Path], texts: Mapping[str, str], folder: Path) -> None:
    """Copies files and folders, replacing leftovers of a killed run; then writes `texts` by name.

    All are synced, because an export that a host's crash truncated would not be complete. Raises OSError.
    """
    for file in files:
        if file.is_dir():
            shutil.copytree(file, folder / file.name, copy_function=_copy, dirs_exist_ok=True)
        else:
            _copy(file, folder / file.name)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        _sync(folder / name)


def _copy(source: str | Path, target: str | Path) -> None:
    shutil.copyfile(source, target)
    _sync(target)


def _sync(path: str | Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def known_ids(folder: Path | None) -> dict[str, Any]:
    """Returns the token ids in the folder's config.json; none if it has no end-of-text id."""
    found = {} if folder is None else _json(folder / CONFIG_FILE)
    return {name: found[name] for name in _IDS if name in found} if "eos_token_id" in found else {}


def side_texts(tokenizer: TokenizerConfig) -> dict[str, str]:
    """Returns files to write after those: a chat template that replaces the tokenizer's own, given as its text."""
    return {} if tokenizer.chat_template is None else {TEMPLATE_FILE: tokenizer.chat_template}


def tokenizer_of(folder: Path) -> TokenizerConfig:
    """Returns the tokenizer in a Hugging Face folder; without tokenizer files, one without a type that names the
    folder.
    """
    has_one = any((folder / name).is_file() for name in _TOKENIZERS)
    return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer" if has_one else None, tokenizer_model=str(folder))


def _has_code(folder: Path) -> bool:
    return any("auto_map" in _json(folder / name) for name in ("tokenizer_config.json", CONFIG_FILE))


def _json(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file; empty if it is missing or invalid, which is reported where it is required."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
