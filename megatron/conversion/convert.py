"""Converts models between this program's checkpoints and Hugging Face folders, streamed and exact.

Only blocks of tensors are held in memory; the output is complete or absent, so a conversion that was killed is simply
run again.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from megatron.base.errors import CheckpointError
from megatron.config.data import TokenizerConfig
from megatron.config.run import RunConfig
from megatron.core.datasets.tokenizer import portable
from megatron.core.dist_checkpointing.whole import WholeTensor, write_whole
from megatron.core.models.hf.families import CONFIG_FILE
from megatron.core.models.hf.side_files import copy_side_files, side_files, side_folder
from megatron.core.models.source import Source, stored_dtype
from megatron.training.checkpoint import converted_state
from megatron.training.export import CheckpointSource, adapter_export, beside_weights, hf_export, write_all
from megatron.training.saved_run import CARRIED_PREFIX, MODEL_PREFIX

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
    """Writes `root`/iter_0000000, weights only, and returns it.

    A tokenizer in a Hugging Face folder is copied to `root`/tokenizer. Raises CheckpointError for a root that already
    holds checkpoints, and OSError, leaving nothing.
    """
    if any(root.glob("iter_*")):
        raise CheckpointError(f"{root} holds checkpoints already; give another folder")
    model = dataclasses.replace(source.model, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    root.mkdir(parents=True, exist_ok=True)
    copied = root / TOKENIZER_FOLDER
    if copied.is_symlink():
        raise CheckpointError(f"{copied} is a symbolic link, and what it points to would be overwritten; remove it")
    is_new = not copied.exists()
    tensors = [
        WholeTensor(MODEL_PREFIX + name, tensor_dtype, shape, functools.partial(source.read, name, dtype=tensor_dtype))
        for name, shape in source.shapes.items()
        for tensor_dtype in [stored_dtype(name, dtype)]
    ]
    tensors += [
        WholeTensor(CARRIED_PREFIX + name, tensor.dtype, tensor.shape, tensor.read)
        for name, tensor in source.carried.tensors.items()
    ]
    try:
        tokenizer = portable(_copy_tokenizer(tokenizer, copied))
        return write_whole(
            root,
            0,
            tensors,
            converted_state(RunConfig(model=model, tokenizer=tokenizer).to_dict(), source.carried),
            on_bytes,
        )
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
    """Writes `folder` in Hugging Face format, with the tokenizer's files if there are any.

    `base` is the folder of the Hugging Face model that training began with, see side_folder. Raises ConfigError if no
    supported family can represent the model, CheckpointError, and OSError, leaving nothing.
    """
    tokenizer = portable(tokenizer)
    beside = side_folder(tokenizer, base)
    export = hf_export(source, folder, dtype, tokenizer, beside)
    write_all(export, *beside_weights(tokenizer, base, folder), on_bytes)


def to_peft(
    source: CheckpointSource, folder: Path, *, dtype: torch.dtype, on_bytes: OnBytes = lambda nbytes: None
) -> None:
    """Writes the adapters of a checkpoint in PEFT's format. Raises ConfigError if it has none, otherwise as `to_hf`."""
    write_all(adapter_export(source, folder, dtype), {}, {}, on_bytes)


def _copy_tokenizer(tokenizer: TokenizerConfig, folder: Path) -> TokenizerConfig:
    beside = side_folder(tokenizer, None)
    if beside is None:
        return tokenizer
    files = side_files(tokenizer, None)
    if (config := beside / CONFIG_FILE).is_file():
        # Some tokenizers need it, and it has information that is needed to convert the model back.
        files[CONFIG_FILE] = config
    if not files:
        return tokenizer
    folder.mkdir(exist_ok=True)
    copy_side_files(files, {}, folder)
    return dataclasses.replace(tokenizer, tokenizer_model=str(folder))
