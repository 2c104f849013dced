"""Rules about the files of a run: data, tokenizer, checkpoints. See rules/model.py for the form of a rule."""

from __future__ import annotations

from pathlib import Path

from megatron.base.errors import ConfigError
from megatron.config.rules.model import shape_is_pending
from megatron.config.run import RunConfig
from megatron.config.split import DEFAULT_SPLIT, split_shares


def one_data_source(run: RunConfig, world_size: int) -> str | None:
    """The data is random tokens, one dataset that is split, or one dataset per split."""
    d = run.data
    per_split = [
        name
        for name, paths in (
            ("--train-data-path", d.train_data_path),
            ("--valid-data-path", d.valid_data_path),
            ("--test-data-path", d.test_data_path),
        )
        if paths is not None
    ]
    if d.mock_data and d.data_path is not None:
        return "--mock-data and --data-path exclude each other; give one of them"
    if d.mock_data or d.data_path is not None:
        # both override the data paths of each split, as in Megatron-LM: rules/needs.py makes notes of those
        return None
    if not per_split:
        return "there is no data; give --data-path, --train-data-path or --mock-data"
    if per_split and d.train_data_path is None and not run.train.skip_train:
        return f"{' and '.join(per_split)} leaves nothing to train on; give --train-data-path"
    return None


def data_paths_are_not_empty(run: RunConfig, world_size: int) -> str | None:
    """A path flag without a value reads nothing."""
    d = run.data
    for name, paths in (
        ("--data-path", d.data_path),
        ("--train-data-path", d.train_data_path),
        ("--valid-data-path", d.valid_data_path),
        ("--test-data-path", d.test_data_path),
    ):
        if paths == ():
            return f"{name} names no dataset; give a prefix, or remove it"
    return None


def split_is_three_shares(run: RunConfig, world_size: int) -> str | None:
    """--split is up to three numbers for training, validation and test."""
    try:
        split_shares(run.data.split or DEFAULT_SPLIT)
    except ConfigError as error:
        return str(error)
    return None


def tokenizer_has_its_files(run: RunConfig, world_size: int) -> str | None:
    """Each kind of tokenizer is read from its own files."""
    t = run.tokenizer
    kind = t.tokenizer_type
    if kind is None:
        return "--tokenizer-type is missing; give it (NullTokenizer with --vocab-size for data that is token ids)"
    if kind == "NullTokenizer":
        known = run.model.vocab_size is not None or shape_is_pending(run)
        return None if known else "--tokenizer-type NullTokenizer has no vocabulary; give --vocab-size"
    if kind == "GPT2BPETokenizer":
        files = {"--vocab-file": t.vocab_file, "--merge-file": t.merge_file}
    else:
        files = {"--tokenizer-model": t.tokenizer_model}
    missing = [name for name, path in files.items() if path is None]
    return f"--tokenizer-type {kind} is read from {' and '.join(missing)}; give it" if missing else None


def end_of_document_is_an_id(run: RunConfig, world_size: int) -> str | None:
    """--null-tokenizer-eod-id names one of NullTokenizer's ids; other tokenizers have a token for it."""
    kind, eod, size = run.tokenizer.tokenizer_type, run.tokenizer.null_tokenizer_eod_id, run.model.vocab_size
    if eod is None:
        return None
    if kind != "NullTokenizer":
        return f"--null-tokenizer-eod-id has no effect: --tokenizer-type is {kind}, not NullTokenizer; remove it"
    if size is not None and eod >= size:
        return f"--null-tokenizer-eod-id {eod} is not below the vocabulary of {size}; lower it, or raise --vocab-size"
    return None


def conversations_are_read(run: RunConfig, world_size: int) -> str | None:
    """Instruction data comes from files, and itself marks the tokens to train on."""
    if not run.data.sft:
        return None
    if run.data.mock_data:
        return "--mock-data makes up documents, not conversations; give --data-path with a dataset of preprocess_sft.py"
    return None


def pretrained_is_only_the_start(run: RunConfig, world_size: int) -> str | None:
    """--pretrained-checkpoint starts a run once; --finetune starts anew each time, and --load-hf from another model."""
    c = run.checkpoint
    if c.pretrained_checkpoint is not None and c.load_hf is not None:
        return "--pretrained-checkpoint and --load-hf both give the first weights; give one of them"
    if c.pretrained_checkpoint is not None and c.finetune:
        return (
            "--finetune would start anew from the progress that --pretrained-checkpoint goes on with; remove --finetune"
        )
    return None


def saves_have_an_interval(run: RunConfig, world_size: int) -> str | None:
    """Without an interval nothing would be saved before the end."""
    c = run.checkpoint
    if c.save is not None and c.save_interval is None and not run.train.skip_train:
        return f"--save {c.save} needs to know how often; give --save-interval"
    return None


def exports_are_not_checkpoints(run: RunConfig, world_size: int) -> str | None:
    """Both are called iter_0000100: in one folder an export would replace its checkpoint."""
    c = run.checkpoint
    if c.save is not None and c.save_hf is not None and Path(c.save).absolute() == Path(c.save_hf).absolute():
        return f"--save {c.save} and --save-hf {c.save_hf} are the same folder; give --save-hf one of its own"
    return None


def one_schedule_wins(run: RunConfig, world_size: int) -> str | None:
    """If the flags' schedule and the checkpoint's differ, only one may take precedence."""
    s = run.schedule
    if s.override_opt_param_scheduler and s.use_checkpoint_opt_param_scheduler:
        return (
            "--override-opt-param-scheduler (flags win) and --use-checkpoint-opt-param-scheduler (checkpoint wins) "
            "exclude each other; give one of them"
        )
    return None


RULES = (
    one_data_source,
    data_paths_are_not_empty,
    split_is_three_shares,
    tokenizer_has_its_files,
    end_of_document_is_an_id,
    conversations_are_read,
    pretrained_is_only_the_start,
    saves_have_an_interval,
    exports_are_not_checkpoints,
    one_schedule_wins,
)
