"""Models from one format to another: our checkpoints and Hugging Face folders, streamed and exact.

Nothing is held but blocks of tensors; what is written is there whole or not at all, so a conversion that was killed is
simply run again.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from megatron.base.errors import CheckpointError
from megatron.base.log import get_logger
from megatron.config.data import TokenizerConfig
from megatron.config.run import RunConfig
from megatron.core.datasets.tokenizer import portable
from megatron.core.dist_checkpointing.whole import WholeTensor, write_whole
from megatron.core.models.hf.export import HFExport
from megatron.core.models.hf.families import CONFIG_FILE
from megatron.core.models.hf.side_files import copy_side_files, side_files, side_folder, side_texts
from megatron.core.models.source import Source
from megatron.training.checkpoint import MODEL_PREFIX, converted_state
from megatron.training.export import CheckpointSource, adapter_export, hf_export

log = get_logger(__name__)
TOKENIZER_FOLDER = "tokenizer"
OnBytes = Callable[[int], None]


def to_checkpoint(
    source: Source,
    root: Path,
    *,
    dtype: torch.dtype,
    tokenizer: TokenizerConfig,
    on_bytes: OnBytes = lambda nbytes: None,
) -> Path:
    """Write `root`/iter_0000000, weights only, and return it.

    A tokenizer in a Hugging Face folder is copied to `root`/tokenizer. Raises CheckpointError for a root that holds
    checkpoints already, and OSError, leaving nothing.
    """
    if any(root.glob("iter_*")):
        raise CheckpointError(f"{root} holds checkpoints already; give another folder")
    model = dataclasses.replace(source.model, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    root.mkdir(parents=True, exist_ok=True)
    copied = root / TOKENIZER_FOLDER
    is_new = not copied.exists()
    tensors = [
        WholeTensor(MODEL_PREFIX + name, dtype, shape, functools.partial(source.read, name, dtype=dtype))
        for name, shape in source.shapes.items()
    ]
    try:
        tokenizer = portable(_copy_tokenizer(tokenizer, copied))
        return write_whole(root, 0, tensors, converted_state(RunConfig(model=model, tokenizer=tokenizer)), on_bytes)
    except BaseException:
        if is_new:
            shutil.rmtree(copied, ignore_errors=True)
        raise


def to_hf(
    source: Source,
    folder: Path,
    *,
    dtype: torch.dtype,
    tokenizer: TokenizerConfig,
    base: str | None = None,
    on_bytes: OnBytes = lambda nbytes: None,
) -> None:
    """Write `folder` in Hugging Face format, with the tokenizer's files where there are any.

    base: the folder of the Hugging Face model that training began with, see side_folder. Raises ConfigError when no
    supported family can hold the model, CheckpointError, and OSError, leaving nothing.
    """
    tokenizer = portable(tokenizer)
    beside = side_folder(tokenizer, base)
    export = hf_export(source, folder, dtype, tokenizer, beside)
    _write_all(export, side_files(beside), side_texts(tokenizer), on_bytes)


def to_peft(
    source: CheckpointSource, folder: Path, *, dtype: torch.dtype, on_bytes: OnBytes = lambda nbytes: None
) -> None:
    """Write the adapters of a checkpoint as PEFT's. Raises ConfigError when it has none, else as `to_hf`."""
    _write_all(adapter_export(source, folder, dtype), [], {}, on_bytes)


def _write_all(export: HFExport, files: Sequence[Path], texts: Mapping[str, str], on_bytes: OnBytes) -> None:
    export.begin()
    try:
        export.write(export.shards, on_bytes)
        export.finish(files, texts)
    except BaseException:
        export.abandon()
        raise


def _copy_tokenizer(tokenizer: TokenizerConfig, folder: Path) -> TokenizerConfig:
    beside = side_folder(tokenizer, None)
    files = side_files(beside)
    if beside is not None and (config := beside / CONFIG_FILE).is_file():
        files.append(config)  # some tokenizers need it, and it knows more than we do when the model goes back
    if not files:
        return tokenizer
    folder.mkdir(exist_ok=True)
    copy_side_files(files, {}, folder)
    return dataclasses.replace(tokenizer, tokenizer_model=str(folder))
