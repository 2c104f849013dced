"""Finds the start of a run: its own progress, the weights of another run, or a Hugging Face model."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from megatron.base.errors import CheckpointError
from megatron.base.log import get_logger
from megatron.config.data import HUGGING_FACE
from megatron.config.model import RUNTIME_FIELDS
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


def take_hf_shape(run: RunConfig) -> RunConfig:
    """Returns the run with the model's shape from --load-hf's folder, and its tokenizer unless another one is given.

    Local: reads config.json. Raises CheckpointError.
    """
    if run.checkpoint.load_hf is None:
        return run
    folder = Path(run.checkpoint.load_hf)
    _, found = read_config(folder)
    check_no_adapter(folder, run.checkpoint.load_adapter)
    # Dropout is in the file, although each run may set its own.
    kept = (set(RUNTIME_FIELDS) - {"attention_dropout", "hidden_dropout"}) | run.given
    own = {f.name: getattr(run.model, f.name) for f in dataclasses.fields(found) if f.name in kept}
    run = dataclasses.replace(run, model=dataclasses.replace(found, **own))
    tokenizer = tokenizer_of(folder)
    if run.tokenizer.tokenizer_type is not None or tokenizer.tokenizer_type is None:
        return run
    own_tokenizer = dataclasses.replace(
        run.tokenizer, tokenizer_type=tokenizer.tokenizer_type, tokenizer_model=tokenizer.tokenizer_model
    )
    return dataclasses.replace(run, tokenizer=own_tokenizer)


def take_adapter_shape(run: RunConfig) -> RunConfig:
    """The run with the rank, alpha and projections of --load-adapter's folder, and its dropout unless one is given.

    Local: reads adapter_config.json and a header. Raises CheckpointError.
    """
    if run.checkpoint.load_adapter is None:
        return run
    found = read_adapter_config(Path(run.checkpoint.load_adapter))
    own = {name: value for name, value in found.items() if name not in run.given}
    return dataclasses.replace(run, model=dataclasses.replace(run.model, **own))


def settle_files(run: RunConfig) -> RunConfig:
    """The run with the files that its checkpoints name as they are found from any folder: the tokenizer, with the chat
    template of the instruction data, and the model of --load-hf.

    Local. Raises ConfigError and DataError for a chat template that cannot be read, or for several that differ.
    """
    tokenizer, checkpoint = portable(run.tokenizer), run.checkpoint
    if run.data.sft and tokenizer.tokenizer_type in HUGGING_FACE:
        sources = [source for _, source in find_sources(run.data).items() if source is not None]
        prefixes = [prefix for source in sources for prefix in parse_blend(source.words, source.flag)[0]]
        template = template_of(prefixes, tokenizer.chat_template)
        tokenizer = dataclasses.replace(tokenizer, chat_template=template)
    if checkpoint.load_hf is not None:
        checkpoint = dataclasses.replace(checkpoint, load_hf=os.path.abspath(checkpoint.load_hf))
    return dataclasses.replace(run, tokenizer=tokenizer, checkpoint=checkpoint)


def find_start(run: RunConfig) -> tuple[RunConfig, Path | None]:
    """Returns (the run, the checkpoint to load). No communication. Raises CheckpointError.

    --load names the checkpoint to continue from. Two kinds of runs begin with the weights of another and later continue
    with their own progress, by the same command; --finetune is set in the returned run while there is none:
    --pretrained-checkpoint, which looks for progress in --load, or else in --save; and fine-tuning on instructions
    (--sft) when --load holds a checkpoint of pre-training, which looks for it in --save. A run that continues
    Megatron-LM's checkpoint in --load continues from its own in --save once there is one.
    """
    config, sft = run.checkpoint, run.data.sft
    if not run.train.skip_train:
        _check_save_is_ours(config.save)
    if config.pretrained_checkpoint is not None:
        own = _progress(config.load or config.save, config.ckpt_step if config.load else None, sft=sft)
        return (run, own) if own else _weights_only(run, _pretrained(config.pretrained_checkpoint))
    if config.load is None:
        return run, None
    required = config.exit_on_missing_checkpoint or config.use_checkpoint_args
    found = find_checkpoint(config.load, config.ckpt_step, required=required)
    if found is None or config.finetune:
        return run, found
    if sft and not _is_of_sft(found):
        own = _progress(config.save, None, sft=sft)
        return (run, own) if own else _weights_only(run, found)
    if is_foreign(found) and config.ckpt_step is None and not run.train.skip_train:
        # Megatron-LM's folder is never saved to: what this run has done since is in its own.
        return run, _progress(config.save, None, sft=sft) or found
    return run, found


def _progress(folder: str | None, step: int | None, *, sft: bool) -> Path | None:
    """The checkpoint in `folder`, which is where this run saves: not one of pre-training when it fine-tunes."""
    found = find(Path(folder), step) if folder is not None else None
    if found is not None and sft and not _is_of_sft(found):
        raise CheckpointError(
            f"{found} is a checkpoint of pre-training where this run looks for its own; give --save (and --load, if it "
            "is given beside --pretrained-checkpoint) a folder of its own"
        )
    if found is not None:
        log.info("going on from this run's own checkpoint %s", found)
    return found


def _check_save_is_ours(folder: str | None) -> None:
    """Raise CheckpointError when --save holds checkpoints of Megatron-LM: one tracker cannot name both, and a save of an
    iteration that is there would replace it."""
    if folder is not None and (other := foreign_in(Path(folder))):
        raise CheckpointError(
            f"--save {folder} holds {other.name} of Megatron-LM, and ours are not put beside it; give --save a folder of "
            "its own and leave --load as it is: the same command goes on from --save once there is a checkpoint in it"
        )


def _pretrained(folder: str) -> Path:
    found = find(Path(folder), None)
    if found is None:
        raise CheckpointError(
            f"--pretrained-checkpoint {folder} holds no checkpoint; give a folder that a run saved in"
        )
    return found


def _weights_only(run: RunConfig, found: Path) -> tuple[RunConfig, Path]:
    log.info("starting at iteration 0 with the weights of %s", found)
    return dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, finetune=True)), found


def _is_of_sft(path: Path) -> bool:
    return bool(read_run_state(path)["config"].get("data", {}).get("sft", False))
