"""Writes Megatron-LM's classic checkpoints, which it loads with --ckpt-format torch."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.dist_checkpointing.boxes import Box
from megatron.core.dist_checkpointing.folders import TRACKER
from megatron.core.dist_checkpointing.storage import sync_folder
from megatron.core.errors import CheckpointError, ConfigError
from megatron.core.models.mapping import Table, gather
from megatron.core.models.mcore.arguments import arguments_of, refuse_what_has_no_argument
from megatron.core.models.mcore.classic import FILE
from megatron.core.models.mcore.names import VOCABULARY, Layout, padded_rows, table
from megatron.core.models.source import Source


def write_mcore(
    source: Source,
    root: Path,
    *,
    tp: int,
    pp: int,
    fused_norms: bool,
    dtype: torch.dtype,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> Path:
    """Write `root`/release for tp x pp ranks, and the tracker. Memory: one rank's weights.

    Raises CheckpointError when there is one already, ConfigError for a layout that cannot be or a model that Megatron-LM has
    no arguments for, and OSError, leaving nothing.
    """
    model = source.model
    assert model.num_layers
    if model.num_layers % pp:
        raise ConfigError(f"--target-pipeline-parallel-size {pp} does not divide the model's {model.num_layers} layers")
    refuse_what_has_no_argument(model)
    layout = Layout(tp, pp, (model.num_layers // pp,) * pp, fused_norms, padded_rows(model, tp))
    names = table(model, layout, copies=True)
    final, temporary = root / "release", root / ".release.tmp"
    if final.exists():
        raise CheckpointError(f"{final} is there already; give another folder")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    arguments = _arguments(model, layout, dtype)
    try:
        for stage in range(pp):
            for rank in range(tp):
                folder = layout.folder(rank, stage)
                held: dict[str, Tensor] = {}
                for key, shape in names.theirs.items():
                    place, _, name = key.split("/", 2)
                    if place == folder:
                        held[name] = _tensor(source, names, key, _full_shape(name, shape, layout), dtype)
                        on_bytes(held[name].nbytes)
                _save(temporary / folder, arguments, held)
        sync_folder(temporary)
        temporary.rename(final)
        (root / TRACKER).write_text("release", encoding="ascii")
        sync_folder(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _tensor(source: Source, names: Table, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    whole = Box((0,) * len(shape), shape)
    return gather(names.of_theirs(key, whole), whole, dtype, lambda own, box: source.read(own, box, dtype))


def _full_shape(name: str, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """With the padding of the vocabulary."""
    return (layout.vocabulary, *shape[1:]) if name.endswith(VOCABULARY) else shape


def _save(folder: Path, arguments: argparse.Namespace, tensors: dict[str, Tensor]) -> None:
    folder.mkdir()
    content = {"args": arguments, "checkpoint_version": 3.0, "iteration": 0, "model": tensors}
    with open(folder / FILE, "xb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def _arguments(model: ModelConfig, layout: Layout, dtype: torch.dtype) -> argparse.Namespace:
    """What Megatron-LM's --use-checkpoint-args reads, and what describes the model beside it."""
    return argparse.Namespace(
        **arguments_of(model),
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        mask_padded_vocabulary=model.mask_padded_vocabulary,  # for reading it here again; Megatron-LM does not know it
        padded_vocab_size=layout.vocabulary * layout.tp,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        iteration=0,
    )
