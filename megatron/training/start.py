"""Finds the start of a run: its own progress, the weights of another run, or a Hugging Face model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from pathlib import Path

from megatron.base.errors import CheckpointError, ConfigError
from megatron.base.log import get_logger
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import HUGGING_FACE, DataConfig, TokenizerConfig
from megatron.config.model import OVERRIDABLE_FIELDS, RUNTIME_FIELDS, ModelConfig
from megatron.config.run import RunConfig
from megatron.core.datasets.blend import parse_blend
from megatron.core.datasets.build import find_sources
from megatron.core.datasets.sft import template_of
from megatron.core.datasets.tokenizer import portable
from megatron.core.dist_checkpointing.folders import find, foreign_in, is_foreign
from megatron.core.models.hf.adapter import check_no_adapter, read_adapter_config
from megatron.core.models.hf.families import read_config
from megatron.core.models.hf.side_files import tokenizer_of
from megatron.training.checkpoint import find_checkpoint
from megatron.training.saved_run import read_run_state

log = get_logger(__name__)


def take_shape_from_files(run: RunConfig) -> RunConfig:
    """Returns the run with the model's shape and the tokenizer of --load-hf, and the adapters' shape of --load-adapter.

    Given flags win where a run may choose: the tokenizer, and dropout. Local: reads config.json, adapter_config.json
    and a header. Raises CheckpointError.
    """
    model, tokenizer = run.model, run.tokenizer
    if run.checkpoint.load_hf is not None:
        folder = Path(run.checkpoint.load_hf)
        model = _model_in(folder, model, run.given | {*run.checkpoint.override_model_fields})
        check_no_adapter(folder, run.checkpoint.load_adapter)
        tokenizer = _tokenizer_in(folder, tokenizer)
    if run.checkpoint.load_adapter is not None:
        settings = read_adapter_config(Path(run.checkpoint.load_adapter))
        model = dataclasses.replace(model, **{name: value for name, value in settings.items() if name not in run.given})
    return dataclasses.replace(run, model=model, tokenizer=tokenizer)


def _model_in(folder: Path, model: ModelConfig, flags: Collection[str]) -> ModelConfig:
    """Returns the model of a Hugging Face folder, with the precision and the kernels of this run,
    and its fields `flags`."""
    _, stored = read_config(folder)
    assert stored.vocab_size
    if model.vocab_size is not None and model.vocab_size < stored.vocab_size:
        raise ConfigError(
            f"--vocab-size {model.vocab_size} is below the {stored.vocab_size} tokens of --load-hf {folder}; give "
            f"{stored.vocab_size} or more, or leave it out"
        )
    # Dropout is in the file, although each run may set its own.
    fields = (set(RUNTIME_FIELDS) - {"attention_dropout", "hidden_dropout"}) | {"mtp_num_layers", *flags}
    overrides = {f.name: getattr(model, f.name) for f in dataclasses.fields(stored) if f.name in fields}
    for name, value in overrides.items():
        if name in OVERRIDABLE_FIELDS and value != getattr(stored, name):
            log.warning("%s: %s in %s, %s in this run", name, getattr(stored, name), folder, value)
    return dataclasses.replace(stored, **overrides)


def _tokenizer_in(folder: Path, config: TokenizerConfig) -> TokenizerConfig:
    """Returns the tokenizer of a Hugging Face folder, unless it has none or the flags name another one."""
    stored = tokenizer_of(folder)
    if config.tokenizer_type is not None or stored.tokenizer_type is None:
        return config
    return dataclasses.replace(config, tokenizer_type=stored.tokenizer_type, tokenizer_model=stored.tokenizer_model)


def settle_files(
    tokenizer: TokenizerConfig, checkpoint: CheckpointConfig, data: DataConfig
) -> tuple[TokenizerConfig, CheckpointConfig]:
    """Returns the flags about the tokenizer and about checkpoints, with file names that are valid in any folder.

    The run's checkpoints hold these names. The tokenizer of instruction data includes the data's chat template. Local.
    Raises ConfigError and DataError for a chat template that cannot be read, or for several that differ.
    """
    tokenizer = portable(tokenizer)
    if data.sft and tokenizer.tokenizer_type in HUGGING_FACE:
        sources = [source for _, source in find_sources(data).items() if source is not None]
        prefixes = [prefix for source in sources for prefix in parse_blend(source.words, source.flag)[0]]
        template = template_of(prefixes, tokenizer.chat_template)
        tokenizer = dataclasses.replace(tokenizer, chat_template=template)
    if checkpoint.load_hf is not None:
        checkpoint = dataclasses.replace(checkpoint, load_hf=os.path.abspath(checkpoint.load_hf))
    return tokenizer, checkpoint


def find_start(config: CheckpointConfig, *, sft: bool, trains: bool) -> tuple[CheckpointConfig, Path | None]:
    """Returns (the flags about checkpoints, the checkpoint to load). No communication. Raises CheckpointError.

    --load names the checkpoint to continue from. Two kinds of runs begin with the weights of another and later continue
    with their own progress, by the same command; --finetune is set in the returned flags while there is none:
    --pretrained-checkpoint, which looks for progress in --load, or else in --save; and fine-tuning on instructions
    (`sft`) when --load holds a checkpoint of pre-training, which looks for it in --save. A run that continues
    Megatron-LM's checkpoint in --load continues from its own in --save once there is one. `trains` is False with
    --skip-train.
    """
    if trains:
        _check_save_is_ours(config.save)
    if config.pretrained_checkpoint is not None:
        progress = _progress(config.load or config.save, config.ckpt_step if config.load else None, sft=sft)
        return (config, progress) if progress else _weights_only(config, find_pretrained(config.pretrained_checkpoint))
    if config.load is None:
        return config, None
    required = config.exit_on_missing_checkpoint or config.use_checkpoint_args
    path = find_checkpoint(config.load, config.ckpt_step, required=required)
    if path is None or config.finetune:
        return config, path
    if sft and not _is_of_sft(path):
        progress = _progress(config.save, None, sft=sft)
        return (config, progress) if progress else _weights_only(config, path)
    if is_foreign(path) and config.ckpt_step is None and trains:
        # Megatron-LM's folder is never saved to: what this run has done since is in its own.
        return config, _progress(config.save, None, sft=sft) or path
    return config, path


def _progress(folder: str | None, step: int | None, *, sft: bool) -> Path | None:
    """The checkpoint in `folder`, which is where this run saves: not one of pre-training when it fine-tunes."""
    path = find(Path(folder), step) if folder is not None else None
    if path is not None and sft and not _is_of_sft(path):
        raise CheckpointError(
            f"{path} is a checkpoint of pre-training where this run looks for its own; give --save (and --load, if it "
            "is given beside --pretrained-checkpoint) a folder of its own"
        )
    if path is not None:
        log.info("going on from this run's own checkpoint %s", path)
    return path


def _check_save_is_ours(folder: str | None) -> None:
    """Raise CheckpointError when --save holds checkpoints of Megatron-LM: one tracker cannot name both, and a save of
    an iteration that is there would replace it."""
    if folder is not None and (other := foreign_in(Path(folder))):
        raise CheckpointError(
            f"--save {folder} holds {other.name} of Megatron-LM, and ours are not put beside it; give --save "
            "a folder of its own and leave --load as it is: the same command goes on from --save once there is a "
            "checkpoint in it"
        )


def find_pretrained(folder: str) -> Path:
    """Returns the checkpoint in --pretrained-checkpoint. Raises CheckpointError."""
    path = find(Path(folder), None)
    if path is None:
        raise CheckpointError(
            f"--pretrained-checkpoint {folder} holds no checkpoint; give a folder that a run saved in"
        )
    return path


def _weights_only(config: CheckpointConfig, path: Path) -> tuple[CheckpointConfig, Path]:
    log.info("starting at iteration 0 with the weights of %s", path)
    return dataclasses.replace(config, finetune=True), path


def _is_of_sft(path: Path) -> bool:
    return bool(read_run_state(path)["config"].get("data", {}).get("sft", False))
