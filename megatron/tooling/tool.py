"""Shared code of the tools that run a saved model: flags, opening the model, and exit."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from megatron.base.errors import ConfigError
from megatron.base.launch import launch_environment
from megatron.base.log import setup_logging
from megatron.command_line.exits import exit_code
from megatron.command_line.flag_parser import FlagParser, path_word, within
from megatron.config.context_limit import context_limit
from megatron.config.data import TokenizerConfig
from megatron.config.interval import COUNT_OR_NONE, RANKS
from megatron.config.parallel import DEVICES, DEVICES_SHOWN, ParallelConfig
from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.context import Build
from megatron.tooling.restore import (
    Saved,
    check_pp,
    check_tp,
    parse_dtype,
    read_hf,
    read_saved,
    restore_model,
    restore_tokenizer,
    with_adapter,
)
from megatron.training.process import start_process


def add_model_flags(parser: FlagParser) -> None:
    """Adds the flags for the model, the tokenizer, the device and the precision."""
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--load", type=path_word, metavar="DIR", help="folder that a run saved its checkpoints in")
    either.add_argument(
        "--load-hf", type=path_word, metavar="DIR", help="or a model in Hugging Face format, which needs no conversion"
    )
    add = parser.add_argument
    add(
        "--load-adapter",
        type=path_word,
        metavar="DIR",
        help="put the LoRA adapter in this folder, as PEFT saves it, on the model",
    )
    add("--ckpt-step", type=within(int, COUNT_OR_NONE), metavar="N", help="iteration of --load (default: the newest)")
    for name in ("bf16", "fp16", "fp32"):
        add(f"--{name}", action="store_true", help=f"run in {name} (default: as the weights are stored)")
    add(
        "--tensor-model-parallel-size",
        type=within(int, RANKS),
        metavar="N",
        help="parts of each layer (default: processes / pp)",
    )
    add(
        "--pipeline-model-parallel-size",
        type=within(int, RANKS),
        default=1,
        metavar="N",
        help="parts of the layers (default 1)",
    )
    add(
        "--device",
        default="auto",
        choices=DEVICES,
        metavar=DEVICES_SHOWN,
        help="auto takes CUDA when there is one; cuda:N is that device for all processes of a host",
    )
    # Flags that are not given are omitted from the namespace: the model's own values apply.
    for name, help in (
        ("--tokenizer-type", "kind of tokenizer (default: the model's own, as for the next three)"),
        ("--tokenizer-model", "the tokenizer's folder or file"),
        ("--vocab-file", "vocab.json of GPT2BPETokenizer"),
        ("--merge-file", "merges.txt of GPT2BPETokenizer"),
    ):
        add(name, type=path_word, default=argparse.SUPPRESS, metavar="TEXT", help=help)
    add("--trust-remote-code", action="store_true", help="let a Hugging Face tokenizer run code from its own folder")


def read_model(args: argparse.Namespace) -> tuple[Saved, Tokenizer]:
    """Returns the saved model's description, with the flags' tokenizer and precision, and the built tokenizer.

    It runs before the processes communicate. Raises UserErrors.
    """
    tp, pp = _layout(args)
    saved = _find_model(args)
    dtype = parse_dtype(args.bf16, args.fp16, args.fp32, saved.stored)
    names = {field.name for field in dataclasses.fields(TokenizerConfig)}
    changes = {name: value for name, value in vars(args).items() if name in names}
    saved = dataclasses.replace(saved, dtype=dtype, tokenizer=dataclasses.replace(saved.tokenizer, **changes))
    check_tp(saved, tp)
    check_pp(saved, pp)
    return saved, restore_tokenizer(saved, trust_remote_code=args.trust_remote_code)


def _find_model(args: argparse.Namespace) -> Saved:
    if args.load_hf is not None and args.ckpt_step is not None:
        raise ConfigError(f"--ckpt-step {args.ckpt_step} has no effect with --load-hf; remove it")
    hf, adapter = args.load_hf, args.load_adapter
    saved = read_saved(args.load, args.ckpt_step) if hf is None else read_hf(hf, adapter)
    return saved if adapter is None else with_adapter(saved, adapter)


def _layout(args: argparse.Namespace) -> tuple[int, int]:
    """Returns (tp, pp), which use all processes: there are no replicas. Raises ConfigError."""
    world_size, tp, pp = launch_environment()[1], args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if tp is None and world_size % pp:
        raise ConfigError(
            f"{world_size} processes for --pipeline-model-parallel-size {pp}; start a multiple of {pp} with torchrun"
        )
    if tp is not None and tp * pp != world_size:
        raise ConfigError(
            f"{world_size} processes for --tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp}; "
            f"start {tp * pp} with torchrun, or leave the first flag out"
        )
    return world_size // pp, pp


def open_model(saved: Saved, args: argparse.Namespace, timeout_minutes: float) -> tuple[GPTModel, Build]:
    """Builds this process's part of the model. Collective over the world. Raises CheckpointError.

    `timeout_minutes` is the time that a process waits for one that is frozen.
    """
    rank, world_size, local_rank = launch_environment()
    tp, pp = _layout(args)
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        device=args.device,
        distributed_timeout_minutes=timeout_minutes,
    )
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    groups, chosen = start_process(parallel, rank, world_size, local_rank, local_world_size)
    return restore_model(saved, groups, chosen, timeout_minutes * 60)


def check_text(flag: str, text: str | None) -> None:
    """Raises ConfigError for text that is not UTF-8: Python keeps such bytes of the command line as lone surrogates."""
    if text is not None and any("\ud800" <= character <= "\udfff" for character in text):
        shown = text.encode(errors="backslashreplace").decode()
        raise ConfigError(f"{flag} '{shown}' is not text in UTF-8; check the terminal's or the program's encoding")


def check_stop_ids(ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """Raises ConfigError for an id that is never generated."""
    for token in ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise ConfigError(f"--stop-id {token} must be from 0 to {tokenizer.vocab_size - 1}: the tokenizer's ids")


def context_length(saved: Saved, requested: int | None, flag: str, default_limit: int | None = None) -> int:
    """Returns the longest sequence: the requested one, or the model's own limit, but at most `default_limit`.

    Raises ConfigError for one above the model's limit.
    """
    limit = context_limit(saved.model)
    if requested is not None and limit is not None and requested > limit[0]:
        raise ConfigError(f"{flag} {requested} is above the model's {limit[1]} {limit[0]}; give {limit[0]} or less")
    if requested is not None:
        return requested
    limits = [size for size in (limit and limit[0], default_limit) if size is not None]
    if not limits:
        raise ConfigError(f"the model of {saved.path} has no --max-position-embeddings; give {flag}")
    return min(limits)


def run_tool(parser: FlagParser, work: Callable[[argparse.Namespace], None], argv: Sequence[str]) -> int:
    """Runs a tool and returns its exit code, see `exit_code`. Log lines go to stderr; stdout is for the tool's
    results."""
    if code := exit_code(_check_launch):
        return code
    rank = launch_environment()[0]
    with contextlib.redirect_stdout(sys.stderr):
        setup_logging(rank)
    return exit_code(lambda: work(parser.parse_args(argv)), rank)


def _check_launch() -> None:
    launch_environment()


def end(code: int) -> NoReturn:
    """Exits immediately after an error: tearing down process groups would wait for ranks that may never answer."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.environ.get("RANK", "0") != "0":
        # the launcher ends all ranks when the first one ends, which should be the rank that prints the error
        time.sleep(5)
    os._exit(code)
