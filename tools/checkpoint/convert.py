"""Convert a model between Hugging Face folders, this program's checkpoints and Megatron-LM's. See docs/conversion.md.

python tools/checkpoint/convert.py --loader hf --saver megatron --load-dir Llama-3.2-1B --save-dir checkpoints/llama
python tools/checkpoint/convert.py --loader megatron --saver hf --load-dir checkpoints/run --save-dir out/hf
python tools/checkpoint/convert.py --loader megatron --saver peft --load-dir checkpoints/lora --save-dir out/adapter
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from megatron.base.errors import CheckpointError, ConfigError
from megatron.base.log import get_logger, setup_logging
from megatron.command_line.exits import exit_code
from megatron.command_line.flag_parser import FlagParser, path_word, within
from megatron.config.data import TokenizerConfig
from megatron.config.interval import COUNT_OR_NONE, RANKS, SIZE
from megatron.conversion.convert import OnBytes, to_checkpoint, to_hf, to_peft
from megatron.conversion.to_megatron_lm import training_state_of
from megatron.core.models.hf.adapter import AdaptedSource, AdapterSource
from megatron.core.models.hf.side_files import tokenizer_of
from megatron.core.models.hf.source import HFSource
from megatron.core.models.mcore.arguments import flags_beside
from megatron.core.models.mcore.dist_writer import write_torch_dist
from megatron.core.models.mcore.source import MCoreSource
from megatron.core.models.mcore.training_state import TrainingState
from megatron.core.models.mcore.writer import write_mcore
from megatron.core.models.merge import MergedSource
from megatron.core.models.source import Source
from megatron.spec.lora import is_adapter
from megatron.tooling.restore import Saved, check_tp, parse_dtype, read_saved
from megatron.training.export import CheckpointSource

log = get_logger(__name__)


def build_parser() -> FlagParser:
    """Returns a parser of the tool's flags, with Megatron-LM's names if it has them."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--model-type", default="GPT", choices=("GPT",), help="all models here are GPT decoders")
    formats = ("hf", "megatron", "mcore")
    add("--loader", required=True, choices=formats, help="format of --load-dir; mcore is Megatron-LM's own")
    add(
        "--saver",
        required=True,
        choices=(*formats, "peft"),
        help="format of --save-dir; peft writes the LoRA adapters alone, all others a model with adapters merged",
    )
    add(
        "--load-dir",
        type=path_word,
        required=True,
        metavar="DIR",
        help="a Hugging Face model, or a folder that a run saved in",
    )
    add("--save-dir", type=path_word, required=True, metavar="DIR", help="must not hold anything yet")
    add(
        "--load-adapter",
        type=path_word,
        metavar="DIR",
        help="merge the LoRA adapter in this folder, as PEFT saves it, into the model",
    )
    add("--ckpt-step", type=within(int, COUNT_OR_NONE), metavar="N", help="iteration to load (default: the newest)")
    add("--bf16", action="store_true", help="write bf16 (default: as the weights are stored)")
    add("--fp16", action="store_true", help="write fp16")
    add("--fp32", action="store_true", help="write fp32")
    _add_mcore_flags(parser)
    add("--tokenizer-type", metavar="TYPE", help="as in training (default: the tokenizer found with the model)")
    add("--tokenizer-model", type=path_word, metavar="PATH", help="the tokenizer's folder or file")
    return parser


def _add_mcore_flags(parser: FlagParser) -> None:
    """Adds the flags of Megatron-LM's formats."""
    add = parser.add_argument
    add(
        "--target-tensor-parallel-size",
        type=within(int, RANKS),
        metavar="N",
        help="tensor-parallel ranks of --saver mcore (default 1; with torch_dist only the padding of the vocabulary "
        "depends on them); for others the check that the model can be cut N times: our checkpoints load under "
        "every layout",
    )
    add(
        "--target-pipeline-parallel-size",
        type=within(int, RANKS),
        metavar="N",
        help="stages of --saver mcore --format torch (default 1)",
    )
    add(
        "--target-expert-parallel-size",
        type=within(int, RANKS),
        metavar="N",
        help="expert-parallel ranks of --saver mcore (default 1; torch_dist is for any number of them, but its "
        "optimizer is either for 1 or for any above)",
    )
    add(
        "--target-expert-tensor-parallel-size",
        type=within(int, RANKS),
        metavar="N",
        help="ranks that share each expert, of --saver mcore --format torch; must divide "
        "--target-tensor-parallel-size, which is the default",
    )
    add(
        "--format",
        choices=("torch", "torch_dist"),
        help="format of --saver mcore, with the names of Megatron-LM's --ckpt-format (default torch)",
    )
    add(
        "--no-load-optim",
        action="store_true",
        default=None,
        help="with --loader megatron --saver mcore: take only the weights, without the training state",
    )
    add(
        "--saver-transformer-impl",
        choices=("transformer_engine", "local"),
        help="the implementation of modules for which --saver mcore writes (default transformer_engine)",
    )
    add(
        "--true-vocab-size",
        type=within(int, SIZE),
        metavar="N",
        help="vocabulary size for --loader mcore, if the checkpoint only has the padded one",
    )
    add(
        "--ignore-arguments",
        nargs="+",
        metavar="NAME",
        help="for --loader mcore: unknown arguments in the checkpoint on which the model does not depend",
    )


def main(argv: Sequence[str]) -> int:
    """Returns the exit code, see `exit_code`; no partial output remains after an error."""
    setup_logging(0)
    return exit_code(lambda: run(build_parser().parse_args(argv)))


def run(args: argparse.Namespace) -> None:
    """Opens, checks, converts, and logs the result."""
    check_flags(args)
    source, tokenizer, base = open_source(args)
    tokenizer = with_flags(tokenizer, args)
    dtype = parse_dtype(args.bf16, args.fp16, args.fp32, source.dtype)
    if args.target_tensor_parallel_size:
        check_tp(Saved(Path(args.load_dir), source.model, tokenizer), args.target_tensor_parallel_size)
    training = TrainingState()
    if args.saver == "mcore" and isinstance(source, CheckpointSource) and not args.no_load_optim:
        training = training_state_of(source, dtype)
    carried = source.carried.nbytes if args.saver in ("hf", "megatron") else 0
    topk = source.model.indexer_topk
    if source.carried.tensors and args.saver == "mcore":
        names = source.carried.tensors
        log.warning(
            "%d tensors, such as %s, are dropped: Megatron-LM has no place for them%s",
            len(names),
            next(iter(names)),
            f"; without its indexer the model is the same up to {topk} tokens" if topk else "",
        )
    shapes = [shape for name, shape in source.shapes.items() if args.saver != "peft" or is_adapter(name)]
    nbytes = sum(math.prod(shape) for shape in shapes) * (dtype.itemsize + (12 if training.adam else 0)) + carried
    started, target = time.perf_counter(), Path(args.save_dir)
    with removed_on_failure(target), progress(nbytes) as on_bytes:
        if isinstance(source, CheckpointSource) and args.saver == "peft":
            to_peft(source, target, dtype=dtype, on_bytes=on_bytes)
        elif args.saver == "mcore":
            target = to_mcore(args, source, target, dtype, training, on_bytes)
        elif args.saver == "hf":
            to_hf(source, target, dtype=dtype, tokenizer=tokenizer, base=base, on_bytes=on_bytes)
        else:
            target = to_checkpoint(source, target, dtype=dtype, tokenizer=tokenizer, on_bytes=on_bytes)
    seconds = time.perf_counter() - started
    count = len(shapes) + (len(source.carried.tensors) if carried else 0)
    log.info("wrote %s: %d tensors, %.2f GB in %.1f s", target, count, nbytes / 1e9, seconds)
    if args.saver == "mcore":
        log.info(
            "Megatron-LM takes --use-checkpoint-args%s",
            "".join(f" {flag}" for flag in mcore_flags(args, source, training)),
        )


def to_mcore(
    args: argparse.Namespace,
    source: Source,
    target: Path,
    dtype: torch.dtype,
    training: TrainingState,
    on_bytes: OnBytes,
) -> Path:
    """Writes for Megatron-LM in the requested format; returns the new checkpoint."""
    tp, ep = args.target_tensor_parallel_size or 1, args.target_expert_parallel_size or 1
    local = args.saver_transformer_impl == "local"
    if args.format == "torch_dist":
        return write_torch_dist(
            source, target, tp=tp, ep=ep, local=local, dtype=dtype, training=training, on_bytes=on_bytes
        )
    return write_mcore(
        source,
        target,
        tp=tp,
        pp=args.target_pipeline_parallel_size or 1,
        ep=ep,
        etp=args.target_expert_tensor_parallel_size,
        fused_norms=not local,
        dtype=dtype,
        training=training,
        on_bytes=on_bytes,
    )


def mcore_flags(args: argparse.Namespace, source: Source, training: TrainingState) -> list[str]:
    """Returns the flags that Megatron-LM needs in addition to --use-checkpoint-args."""
    flags = ["--ckpt-format", args.format or "torch", *flags_beside(source.model)]
    local, classic = args.saver_transformer_impl == "local", args.format != "torch_dist"
    flags += ["--transformer-impl", "local"] if local else []
    if source.model.num_experts is not None and classic:
        flags += [] if local else ["--moe-grouped-gemm"]
        sizes = {
            "--expert-model-parallel-size": args.target_expert_parallel_size,
            "--expert-tensor-parallel-size": args.target_expert_tensor_parallel_size,
        }
        flags += [word for flag, size in sizes.items() if size is not None for word in (flag, str(size))]
    if training.adam is None:
        return [*flags, "--finetune"]
    return [*flags, "--no-load-rng" if classic else "--use-distributed-optimizer"]


def check_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError for a flag that the chosen formats do not read, and for incompatible formats."""
    if args.saver == "peft" and args.loader != "megatron":
        raise ConfigError(f"--saver peft writes the adapters of our checkpoints, not of --loader {args.loader}")
    if args.saver == "peft" and args.load_adapter is not None:
        raise ConfigError(f"--load-adapter {args.load_adapter} is an adapter already; remove it, or --saver peft")
    read_by = {
        "ckpt_step": ("--loader", args.loader, ("megatron", "mcore")),
        "true_vocab_size": ("--loader", args.loader, ("mcore",)),
        "ignore_arguments": ("--loader", args.loader, ("mcore",)),
        "target_pipeline_parallel_size": ("--saver", args.saver, ("mcore",)),
        "target_expert_parallel_size": ("--saver", args.saver, ("mcore",)),
        "target_expert_tensor_parallel_size": ("--saver", args.saver, ("mcore",)),
        "format": ("--saver", args.saver, ("mcore",)),
        "no_load_optim": ("--saver", args.saver, ("mcore",)),
        "saver_transformer_impl": ("--saver", args.saver, ("mcore",)),
    }
    for name, (flag, chosen, readers) in read_by.items():
        value = getattr(args, name)
        if value is not None and chosen not in readers:
            said = "" if value is True else " " + (" ".join(value) if isinstance(value, list) else str(value))
            raise ConfigError(f"--{name.replace('_', '-')}{said} has no effect with {flag} {chosen}; remove it")
    if args.no_load_optim and args.loader != "megatron":
        raise ConfigError(
            f"--no-load-optim has no effect with --loader {args.loader}, which takes weights alone; remove it"
        )
    for kind in ("pipeline", "expert_tensor") if args.format == "torch_dist" else ():
        if (size := getattr(args, f"target_{kind}_parallel_size")) is not None:
            raise ConfigError(
                f"--target-{kind.replace('_', '-')}-parallel-size {size} has no effect with --format torch_dist, which "
                "is for any layout; remove it"
            )


def open_source(args: argparse.Namespace) -> tuple[Source, TokenizerConfig, str | None]:
    """Returns the weights, their tokenizer, and the Hugging Face model with which a run began, if any."""
    folder, base = Path(args.load_dir), None
    if not folder.is_dir():
        raise CheckpointError(f"--load-dir {folder} is not a folder")
    source: Source
    if args.loader == "hf":
        in_hf = HFSource(folder, args.load_adapter)
        in_hf.check_copies()
        source, tokenizer = in_hf, tokenizer_of(folder)
    elif args.loader == "mcore":
        source = MCoreSource(folder, args.ckpt_step, args.true_vocab_size, args.ignore_arguments or ())
        tokenizer = TokenizerConfig()
    else:
        saved = read_saved(args.load_dir, args.ckpt_step)
        source, tokenizer = CheckpointSource(saved.path), saved.tokenizer
        base = source.base
    if args.load_adapter is not None:
        source = AdaptedSource(source, AdapterSource(Path(args.load_adapter), source.model))
    if source.model.lora_rank and args.saver != "peft":
        log.info("merging the LoRA adapters into the model")
        source = MergedSource(source)
    return source, tokenizer, base


def with_flags(tokenizer: TokenizerConfig, args: argparse.Namespace) -> TokenizerConfig:
    """Returns the tokenizer that the flags name instead; a folder without --tokenizer-type is a Hugging Face folder."""
    if args.tokenizer_type is None and args.tokenizer_model is None:
        return tokenizer
    if args.tokenizer_model is not None and not Path(args.tokenizer_model).exists():
        raise ConfigError(f"--tokenizer-model {args.tokenizer_model} is not there")
    kind = args.tokenizer_type or "HuggingFaceTokenizer"
    return dataclasses.replace(tokenizer, tokenizer_type=kind, tokenizer_model=args.tokenizer_model)


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Deletes a folder after a failure if it did not exist before."""
    is_new = not folder.exists()
    try:
        yield
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def progress(nbytes: int) -> Iterator[OnBytes]:
    """Shows a bar in GB on a terminal's stderr; otherwise nothing."""
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=nbytes)
        yield lambda done: bar.advance(task, done)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
