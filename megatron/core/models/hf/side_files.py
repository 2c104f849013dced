"""Files other than weights in a Hugging Face folder: the tokenizer's, its templates and code, generation settings, and
the license."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.base.errors import DataError
from megatron.base.log import get_logger
from megatron.base.read_file import read_json
from megatron.config.data import GPT2, SENTENCEPIECE, TIKTOKEN, TokenizerConfig
from megatron.core.models.hf.families import CONFIG_FILE

log = get_logger(__name__)

GENERATION_FILE = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"  # it overrides a template in tokenizer_config.json
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
# Tokenizers with custom code also have custom names for their vocabulary.
_PATTERNS = ["tokenizer*.json", "*.model", "*.tiktoken", "vocab.*", "merges.txt", "special_tokens_map.json"]
_PATTERNS += ["added_tokens.json", "chat_template.*", GENERATION_FILE]
_PATTERNS += ["preprocessor_config.json", "processor_config.json"]  # of models that also see images
_TEMPLATES = "additional_chat_templates"
# transformers' classes, which encode text as ours do: without special tokens around it.
_LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": False}
_CLASSES = {GPT2: {"tokenizer_class": "GPT2Tokenizer"}, **dict.fromkeys(SENTENCEPIECE, _LLAMA)}
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def side_folder(tokenizer: TokenizerConfig, base: str | None) -> Path | None:
    """Returns the Hugging Face folder whose files belong to a model with this tokenizer; None if there is none.

    `base` is the folder of the Hugging Face model that training began with. It is used unless the tokenizer is from
    elsewhere.
    """
    tokenizer_files = [Path(file) for file in (tokenizer.tokenizer_model, tokenizer.vocab_file) if file]
    if tokenizer.tokenizer_model and tokenizer_files[0].is_dir():
        return tokenizer_files[0]
    folder = Path(base) if base else None
    if (
        folder is None
        or not folder.is_dir()
        or any(file.resolve().parent != folder.resolve() for file in tokenizer_files)
    ):
        return None
    return folder


def stop_ids(tokenizer: TokenizerConfig, base: str | None = None) -> list[int]:
    """Returns tokens that end an answer in addition to the tokenizer's eod: eos_token_id of generation_config.json, or
    else, as in transformers, of config.json.

    Models that were trained to chat often have several. base: see `side_folder`. No communication. Raises DataError for
    a file that cannot be read.
    """
    folder = side_folder(tokenizer, base)
    for path in () if folder is None else (folder / GENERATION_FILE, folder / CONFIG_FILE):
        if not path.is_file():
            continue
        try:
            ids = read_json(path).get("eos_token_id")
            if ids is not None:
                return [int(token) for token in (ids if isinstance(ids, list) else [ids])]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} cannot be read: {error}; its eos_token_id is a number or a list of them"
            ) from error
    return []


def side_files(tokenizer: TokenizerConfig, base: str | None) -> dict[str, Path]:
    """Returns name in an export -> file, for all files that belong to a model's weights except config.json.

    These are the files of `side_folder`, those of a tokenizer that consists of files by themselves, under the names by
    which transformers knows them, and the model card and the license of the model that training began with.
    """
    folder = side_folder(tokenizer, base)
    files = {} if folder is None else _files_of(folder)
    for name, path in _own_files(tokenizer).items():
        if path.resolve() not in {other.resolve() for other in files.values()}:
            files[name] = path
    origin = Path(base) if base else folder
    if origin is not None:
        files |= {path.name: path for path in _inside(origin, origin.glob("*")) if _is_legal(path.name)}
    return dict(sorted(files.items()))


def has_tokenizer(files: Mapping[str, Path]) -> bool:
    """Whether transformers finds a tokenizer in an export with these files."""
    return any(name in files for name in (*_TOKENIZERS, "vocab.json")) or any(n.endswith(".py") for n in files)


def copy_side_files(files: Mapping[str, Path], texts: Mapping[str, str], folder: Path) -> None:
    """Copies files to their names in `folder`, replacing leftovers of a killed run; then writes `texts` by name.

    All are synced, because an export that a host's crash truncated would not be complete. Raises OSError.
    """
    for name, file in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)  # it may be a link to another file
        shutil.copyfile(file, folder / name)
        _sync(folder / name)
    for name, text in texts.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
        _sync(folder / name)


def _files_of(folder: Path) -> dict[str, Path]:
    """Tokenizer, templates and settings in a Hugging Face folder."""
    patterns = [*_PATTERNS, *(["*.py"] if _has_code(folder) else [])]
    files = _inside(folder, (path for pattern in patterns for path in folder.glob(pattern)))
    files += _inside(folder, (folder / _TEMPLATES).glob("*.jinja"))
    return {str(path.relative_to(folder)): path for path in files}


def _inside(folder: Path, paths: Iterable[Path]) -> list[Path]:
    """The files among these that are in the folder. A symbolic link to elsewhere is left out: the folder may be
    anybody's, and what the link points to need not be meant for an export. The cache of Hugging Face consists of links
    to its blobs.
    """
    roots = [folder.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    files = []
    for path in paths:
        if path.is_symlink() or path.parent.is_symlink():
            target = path.resolve()
            if not any(target.is_relative_to(root) for root in roots):
                log.warning(
                    "%s is a symbolic link to %s and is not copied; put the file itself in its place", path, target
                )
                continue
        if path.is_file():
            files.append(path)
    return files


def _own_files(tokenizer: TokenizerConfig) -> dict[str, Path]:
    """The files of a tokenizer that is not a Hugging Face folder, by the names that they get."""
    kind, model = tokenizer.tokenizer_type, tokenizer.tokenizer_model
    if kind == GPT2 and tokenizer.vocab_file and tokenizer.merge_file:
        return {"vocab.json": Path(tokenizer.vocab_file), "merges.txt": Path(tokenizer.merge_file)}
    if kind in SENTENCEPIECE and model:
        return {"tokenizer.model": Path(model)}
    if kind == TIKTOKEN and model:
        return {Path(model).name: Path(model)}
    return {}


def _is_legal(name: str) -> bool:
    return name.upper().startswith(("README", "LICENSE", "LICENCE", "NOTICE", "COPYING", "COPYRIGHT", "USE_POLICY"))


def _sync(path: str | Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def known_ids(folder: Path | None) -> dict[str, Any]:
    """Returns the token ids in the folder's config.json; none if it has no end-of-text id."""
    config = {} if folder is None else _json(folder / CONFIG_FILE)
    return {name: config[name] for name in _IDS if name in config} if "eos_token_id" in config else {}


def side_texts(tokenizer: TokenizerConfig, files: Mapping[str, Path]) -> dict[str, str]:
    """Returns files to write after `files`: a chat template that replaces the tokenizer's own, given as its text, and
    the name of transformers' class for a tokenizer whose files do not say it.
    """
    texts = {} if tokenizer.chat_template is None else {TEMPLATE_FILE: tokenizer.chat_template}
    if tokenizer.tokenizer_type in _CLASSES and "tokenizer_config.json" not in files:
        texts["tokenizer_config.json"] = json.dumps(_CLASSES[tokenizer.tokenizer_type], indent=2) + "\n"
    return texts


def tokenizer_of(folder: Path) -> TokenizerConfig:
    """Returns the tokenizer in a Hugging Face folder; without tokenizer files, one without a type that names the
    folder.
    """
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZERS)
    return TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer" if has_tokenizer else None, tokenizer_model=str(folder)
    )


def _has_code(folder: Path) -> bool:
    return any("auto_map" in _json(folder / name) for name in ("tokenizer_config.json", CONFIG_FILE))


def _json(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file; empty if it is missing or invalid, which is reported where it is required."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
