"""Hugging Face folders written from a checkpoint of a run, while it trains (--save-hf) or by the converter."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError, ConfigError
from megatron.base.log import get_logger
from megatron.config.data import TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.core.comm.collectives import gather_objects
from megatron.core.datasets.tokenizer import build_tokenizer
from megatron.core.dist_checkpointing.folders import folder_name
from megatron.core.dist_checkpointing.whole import WholeReader
from megatron.core.models.hf.carried import writable
from megatron.core.models.hf.export import HFExport, leftovers, repair
from megatron.core.models.hf.families import CONFIG_FILE, base_family, write_config
from megatron.core.models.hf.family.family import ExpertNames
from megatron.core.models.hf.folder import SINGLE_FILE
from megatron.core.models.hf.names import table
from megatron.core.models.hf.peft import ADAPTER_CONFIG, ADAPTER_FILE, adapter_config, adapter_table
from megatron.core.models.hf.side_files import has_tokenizer, known_ids, side_files, side_folder, side_texts
from megatron.core.models.source import Source
from megatron.spec.lora import is_adapter
from megatron.training.carried import carried_in
from megatron.training.saved_model import model_config_of
from megatron.training.saved_run import MODEL_PREFIX, check_state, stored_part
from megatron.training.together import together
from megatron.training.trainer import Trainer

T = TypeVar("T")
log = get_logger(__name__)
STOP_SECONDS = 5.0  # that an export may take after a request to stop: torchrun kills a rank after 30
SHARD_BYTES = 4 * 10**9  # of a Hugging Face folder


class CheckpointSource:
    """The weights of a checkpoint of ours: a Source. Checksums are verified as blocks are read.

    base: the Hugging Face model that its training began with, if it began with one. state: see checkpoint.py.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError."""
        self.path, self._reader = path, WholeReader(path)
        self.state = state = self._reader.manifest.state
        check_state(path, state)
        self.model, self.tokenizer = saved_parts(state)
        self.base: str | None = state["config"]["checkpoint"].get("load_hf")
        records = self._reader.manifest.tensors
        self.shapes = {
            name.removeprefix(MODEL_PREFIX): record.shape
            for name, record in records.items()
            if name.startswith(MODEL_PREFIX)
        }
        self.dtype: torch.dtype = getattr(torch, self.model.dtype_name)
        self.carried = carried_in(self._reader)

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """See Source."""
        return self._reader.read(MODEL_PREFIX + name, box, dtype)

    def read_state(self, name: str, key: str, box: Box) -> Tensor:
        """fp32 elements `box` of the optimizer's "master", "exp_avg" ...
        of a weight, in memory that is the caller's."""
        return self._reader.read(f"optimizer/{name}/{key}", box, torch.float32)


class _StopError(Exception):
    """This rank shall stop, and is not done."""


class _Patience:
    """How long work goes on after something asked this rank to stop."""

    def __init__(self, stop_wanted: Callable[[], bool] | None) -> None:
        self._stop_wanted, self._until = stop_wanted, math.inf

    def check(self, nbytes: int) -> None:
        """Raises _StopError when it is over. Call it now and then; threads may."""
        if self._until == math.inf and self._stop_wanted is not None and self._stop_wanted():
            self._until = time.monotonic() + STOP_SECONDS
        if time.monotonic() > self._until:
            raise _StopError


def save_hf(trainer: Trainer, checkpoint: Path) -> Path:
    """Write a checkpoint that was just saved as `--save-hf`/its name, in Hugging Face format, and return that folder.

    For a model with adapters, only the adapters, in PEFT's format. Ranks share the shards; each reads its part of the
    checkpoint. An older folder of that name is replaced. If a rank shall stop (`Trainer.stop_wanted`) and seconds later
    the folder is not written, it is left out: the next start of the run writes it. Collective over the world: barriers
    only. Raises CheckpointError on all ranks when one of them cannot write.
    """
    run, world = trainer.run, trainer.groups.world
    assert run.checkpoint.save_hf
    folder = Path(run.checkpoint.save_hf) / checkpoint.name
    source = together(world, lambda: CheckpointSource(checkpoint))
    files: dict[str, Path] = {}
    texts: dict[str, str] = {}
    if run.model.lora_rank:
        export = adapter_export(source, folder, source.dtype, replace=True)
    else:
        beside = side_folder(run.tokenizer, run.checkpoint.load_hf)
        export = hf_export(source, folder, source.dtype, run.tokenizer, beside, replace=True)
        files, texts = beside_weights(run.tokenizer, run.checkpoint.load_hf, folder)
    together(world, lambda: _writing(folder, export.begin if world.rank == 0 else None))
    patience = _Patience(trainer.stop_wanted)

    def write() -> bool:
        try:
            export.write(export.shards[world.rank :: world.size], patience.check)
        except _StopError:
            return False
        return True

    if not all(gather_objects(together(world, lambda: _writing(folder, write)), world)):
        together(world, lambda: _writing(folder, export.abandon if world.rank == 0 else None))
        log.info("  %s was left out, because the run shall stop: its next start writes it", folder)
        return folder
    finish = functools.partial(export.finish, files, texts)
    together(world, lambda: _writing(folder, finish if world.rank == 0 else None))
    log.info("  successfully saved %s in Hugging Face format", folder)
    return folder


def beside_weights(
    tokenizer: TokenizerConfig, base: str | None, folder: Path
) -> tuple[dict[str, Path], dict[str, str]]:
    """Returns the files and texts that accompany the weights in `folder`, see side_files.py;
    says if no tokenizer does."""
    files = side_files(tokenizer, base)
    if not has_tokenizer(files):
        log.info(
            "%s gets no tokenizer that transformers reads: it is %s", folder, tokenizer.tokenizer_type or "not known"
        )
    return files, side_texts(tokenizer, files)


def write_all(
    export: HFExport,
    files: Mapping[str, Path],
    texts: Mapping[str, str],
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Writes an export in one process. Raises CheckpointError and OSError, leaving nothing behind."""
    export.begin()
    try:
        export.write(export.shards, on_bytes)
        export.finish(files, texts)
    except BaseException:
        export.abandon()
        raise


def complete_exports(trainer: Trainer) -> None:
    """Completes the exports of a killed run: partial ones are deleted, and a missing one of the loaded checkpoint is
    written. Collective over the world. Raises CheckpointError on all ranks."""
    config, world = trainer.run.checkpoint, trainer.groups.world
    assert config.save and config.save_hf
    root, checkpoint = Path(config.save_hf), Path(config.save) / folder_name(trainer.state.iteration)

    def repair_all() -> None:
        for path in leftovers(root):
            repair(path)

    together(world, lambda: _writing(root, repair_all if world.rank == 0 else None))
    owed = trainer.state.iteration > 0 and checkpoint.is_dir() and not (root / checkpoint.name).exists()
    if gather_objects(owed, world)[0]:  # as the first rank sees it
        save_hf(trainer, checkpoint)


def _writing(folder: Path, work: Callable[[], T] | None) -> T | None:
    try:
        return None if work is None else work()
    except OSError as error:
        raise CheckpointError(f"could not save {folder} (--save-hf): {error.strerror}") from error


def hf_export(
    source: Source,
    folder: Path,
    dtype: torch.dtype,
    tokenizer: TokenizerConfig,
    beside: Path | None,
    *,
    replace: bool = False,
) -> HFExport:
    """The export of a source, once its tensors are found to be those that its configuration calls for.

    The files of the folder `beside` accompany the weights. Its config.json is kept if it is this model's: the model
    came from there; else the token ids in it. Raises ConfigError when no supported family can hold the model.
    """
    family, config = write_config(source.model, beside, source.carried)
    carried, depths = writable(source.carried, family, source.model, config)
    config.pop("dtype", None)  # the newer name of the same field
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    if depths:
        config["num_nextn_predict_layers"] = source.model.mtp_num_layers + depths
    if "eos_token_id" not in config and not carried.prefix:
        config |= known_ids(beside) or token_ids(tokenizer, source.model)
    layout, shapes = table(family, source.model, carried_depths=depths), source.shapes
    if source.model.mtp_num_layers and not family.predicts:
        log.info("layers that predict further tokens are left out: folders of %s hold none", family.model_type)
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith("mtp.")}
    _check_shapes(layout.ours, shapes)
    return HFExport(
        source,
        folder,
        dtype,
        layout,
        config=(CONFIG_FILE, config),
        single_file=SINGLE_FILE,
        replace=replace,
        shard_bytes=SHARD_BYTES,
        carried=carried,
        stored=family.stored,
        constants=family.constants_of(source.model.num_layers or 0),
    )


def adapter_export(source: CheckpointSource, folder: Path, dtype: torch.dtype, *, replace: bool = False) -> HFExport:
    """The export of a model's adapters alone, as PEFT keeps them.

    Raises ConfigError when it has none, or when no supported family can hold the model.
    """
    if source.model.lora_rank is None:
        raise ConfigError(f"{source.path} has no LoRA adapters; give --saver hf for the model itself")
    family = base_family(source.model, None if source.base is None else Path(source.base))
    if not family.has_adapters:
        raise ConfigError(
            f"adapters of {family.model_type} are not written in PEFT's format, whose modules have other names or "
            "another order there; give --saver hf for the merged model"
        )
    layout = adapter_table(source.model, family.fused, (family.experts or ExpertNames()).shared)
    _check_shapes(layout.ours, {name: shape for name, shape in source.shapes.items() if is_adapter(name)})
    return HFExport(
        source,
        folder,
        dtype,
        layout,
        config=(ADAPTER_CONFIG, adapter_config(source.model, family, source.base)),
        single_file=ADAPTER_FILE,
        replace=replace,
        shard_bytes=2**63,  # PEFT reads one file
    )


def _check_shapes(expected: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]) -> None:
    for name in sorted({*expected, *stored}):
        if stored.get(name) != expected.get(name):
            raise CheckpointError(
                f"the model has parameter {name} as {_shape(stored.get(name))} and its configuration calls for "
                f"{_shape(expected.get(name))}"
            )


def token_ids(tokenizer: TokenizerConfig, model: ModelConfig) -> dict[str, Any]:
    """Returns the token ids of config.json; null for those that are unknown, or the defaults of the family would hold,
    which may be above the vocabulary.
    """
    if tokenizer.tokenizer_type is None:
        return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    built = build_tokenizer(tokenizer, model.vocab_size)
    return {"bos_token_id": built.bos, "eos_token_id": built.eod, "pad_token_id": None}


def _shape(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else str(list(shape))


def saved_parts(state: dict[str, Any]) -> tuple[ModelConfig, TokenizerConfig]:
    """The model and the tokenizer in a checkpoint's state."""
    return model_config_of(state), stored_part(TokenizerConfig, state, "tokenizer")
