"""Rules about the files of a run: data, tokenizer, checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megatron.base.errors import ConfigError
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DEFAULT_SPLIT, GPT2, NULL, DataConfig, TokenizerConfig, split_shares
from megatron.config.model import ModelConfig
from megatron.config.optimizer import ScheduleConfig
from megatron.config.rules.rule import ConfigRule
from megatron.config.rules.sources import shape_is_pending
from megatron.config.run import RunConfig
from megatron.config.train import TrainConfig


def one_data_source(data: DataConfig, train: TrainConfig) -> str | None:
    """The data is random tokens, one dataset that is split, or one dataset per split."""
    per_split = [
        name
        for name, paths in (
            ("--train-data-path", data.train_data_path),
            ("--valid-data-path", data.valid_data_path),
            ("--test-data-path", data.test_data_path),
        )
        if paths is not None
    ]
    if data.mock_data and data.data_path is not None:
        return "--mock-data and --data-path exclude each other; give one of them"
    if data.mock_data or data.data_path is not None:
        # both override the data paths of each split, as in Megatron-LM: rules/needs.py makes notes of those
        return None
    if not per_split:
        return "there is no data; give --data-path, --train-data-path or --mock-data"
    if per_split and data.train_data_path is None and not train.skip_train:
        return f"{' and '.join(per_split)} leaves nothing to train on; give --train-data-path"
    return None


def data_paths_are_not_empty(data: DataConfig) -> str | None:
    """A path flag without a value reads nothing."""
    for name, paths in (
        ("--data-path", data.data_path),
        ("--train-data-path", data.train_data_path),
        ("--valid-data-path", data.valid_data_path),
        ("--test-data-path", data.test_data_path),
    ):
        if paths == ():
            return f"{name} names no dataset; give a prefix, or remove it"
    return None


def split_is_three_shares(data: DataConfig) -> str | None:
    """--split is up to three numbers for training, validation and test."""
    try:
        split_shares(data.split or DEFAULT_SPLIT)
    except ConfigError as error:
        return str(error)
    return None


def tokenizer_has_its_files(tokenizer: TokenizerConfig, model: ModelConfig, checkpoint: CheckpointConfig) -> str | None:
    """Each kind of tokenizer is read from its own files."""
    kind = tokenizer.tokenizer_type
    if kind is None:
        return "--tokenizer-type is missing; give it (NullTokenizer with --vocab-size for data that is token ids)"
    if kind == NULL:
        has_vocabulary = model.vocab_size is not None or shape_is_pending(model, checkpoint)
        return None if has_vocabulary else "--tokenizer-type NullTokenizer has no vocabulary; give --vocab-size"
    if kind == GPT2:
        files = {"--vocab-file": tokenizer.vocab_file, "--merge-file": tokenizer.merge_file}
    else:
        files = {"--tokenizer-model": tokenizer.tokenizer_model}
    missing = [name for name, path in files.items() if path is None]
    return f"--tokenizer-type {kind} is read from {' and '.join(missing)}; give it" if missing else None


def end_of_document_is_an_id(tokenizer: TokenizerConfig, model: ModelConfig) -> str | None:
    """--null-tokenizer-eod-id names one of NullTokenizer's ids; other tokenizers have a token for it."""
    kind, eod, size = tokenizer.tokenizer_type, tokenizer.null_tokenizer_eod_id, model.vocab_size
    if eod is None:
        return None
    if kind != "NullTokenizer":
        return f"--null-tokenizer-eod-id has no effect: --tokenizer-type is {kind}, not NullTokenizer; remove it"
    if size is not None and eod >= size:
        return f"--null-tokenizer-eod-id {eod} is not below the vocabulary of {size}; lower it, or raise --vocab-size"
    return None


def conversations_are_read(data: DataConfig) -> str | None:
    """Instruction data comes from files, and itself marks the tokens to train on."""
    if not data.sft:
        return None
    if data.mock_data:
        fix = "give a dataset of preprocess_sft.py with --data-path instead"
        return f"--mock-data makes up documents, not conversations; {fix}"
    return None


def pretrained_is_only_the_start(checkpoint: CheckpointConfig) -> str | None:
    """--pretrained-checkpoint starts a run once; --finetune starts anew each time, and --load-hf from another model."""
    if checkpoint.pretrained_checkpoint is not None and checkpoint.load_hf is not None:
        return "--pretrained-checkpoint and --load-hf both give the first weights; give one of them"
    if checkpoint.pretrained_checkpoint is not None and checkpoint.finetune:
        return (
            "--finetune would start anew from the progress that --pretrained-checkpoint goes on with; remove --finetune"
        )
    return None


def saves_have_an_interval(checkpoint: CheckpointConfig, train: TrainConfig) -> str | None:
    """Without an interval nothing would be saved before the end."""
    if checkpoint.save is not None and checkpoint.save_interval is None and not train.skip_train:
        return f"--save {checkpoint.save} needs to know how often; give --save-interval"
    return None


def local_checkpoints_are_on_the_host(checkpoint: CheckpointConfig) -> str | None:
    """Local checkpoints are in memory, or in a folder that is named."""
    kind, folder = checkpoint.non_persistent_ckpt_type, checkpoint.non_persistent_local_ckpt_dir
    if kind == "global":
        return (
            "--non-persistent-ckpt-type global would save to the shared file system, as --save does; give "
            "--save-interval and --save-retain for that, or --non-persistent-ckpt-type memory or local"
        )
    if kind == "local" and folder is None:
        return (
            "--non-persistent-ckpt-type local needs a folder on a disk of each host; give "
            "--non-persistent-local-ckpt-dir, or --non-persistent-ckpt-type memory"
        )
    return None


def exports_are_not_checkpoints(checkpoint: CheckpointConfig) -> str | None:
    """Both are called iter_0000100: in one folder an export would replace its checkpoint."""
    ours, exports = checkpoint.save, checkpoint.save_hf
    if ours is not None and exports is not None and Path(ours).absolute() == Path(exports).absolute():
        return f"--save {ours} and --save-hf {exports} are the same folder; give --save-hf one of its own"
    return None


def one_schedule_wins(schedule: ScheduleConfig) -> str | None:
    """If the flags' schedule and the checkpoint's differ, only one may take precedence."""
    if schedule.override_opt_param_scheduler and schedule.use_checkpoint_opt_param_scheduler:
        return (
            "--override-opt-param-scheduler (flags win) and --use-checkpoint-opt-param-scheduler (checkpoint wins) "
            "exclude each other; give one of them"
        )
    return None


def rules(run: RunConfig) -> list[ConfigRule]:
    """Returns the rules about data, tokenizer and checkpoints. A dry run needs no data, and of a tokenizer only its
    size."""
    reads_no_tokenizer = run.dry_run.dry_run and run.model.vocab_size is not None
    return [
        *([] if run.dry_run.dry_run or run.data.perform_rl_step else [partial(one_data_source, run.data, run.train)]),
        partial(data_paths_are_not_empty, run.data),
        partial(split_is_three_shares, run.data),
        *([] if reads_no_tokenizer else [partial(tokenizer_has_its_files, run.tokenizer, run.model, run.checkpoint)]),
        partial(end_of_document_is_an_id, run.tokenizer, run.model),
        partial(conversations_are_read, run.data),
        partial(pretrained_is_only_the_start, run.checkpoint),
        partial(saves_have_an_interval, run.checkpoint, run.train),
        partial(exports_are_not_checkpoints, run.checkpoint),
        partial(local_checkpoints_are_on_the_host, run.checkpoint),
        partial(one_schedule_wins, run.schedule),
    ]
