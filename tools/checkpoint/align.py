"""Compares a Hugging Face model with ours: sites, logits, first choices, gradients, and the causes of differences.

python tools/checkpoint/align.py --hf models/Llama-3.2-1B
python tools/checkpoint/align.py --hf models/Llama-3.2-1B --load checkpoints/llama --dtype bfloat16 \\
  --data-path data/corpus_text_document --batches 20 --length 256

Exit code 0 if logits differ by at most --threshold ulps on average and gradients by --gradient-threshold, else 1.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

from megatron.base.errors import ConfigError
from megatron.base.log import setup_logging
from megatron.command_line.exits import check_output, exit_code
from megatron.command_line.flag_parser import FlagParser, path_word, within
from megatron.config.interval import NOT_NEGATIVE, SEED, SIZE, between
from megatron.config.parallel import ParallelConfig
from megatron.conversion.align import (
    TIE,
    Choices,
    ModelPair,
    SiteDifference,
    ablation,
    differences,
    first_choices,
)
from megatron.core.datasets.indexed import IndexedDataset
from megatron.core.groups import disconnect
from megatron.tooling.restore import read_saved
from megatron.training.export import CheckpointSource
from megatron.training.process import start_process

HEADER = f"{'layer':>6s}  {'site':11s} {'max ulps':>10s} {'mean ulps':>11s} {'differing':>10s}"


def build_parser() -> FlagParser:
    """Returns a parser of the tool's flags."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--hf", type=path_word, required=True, metavar="DIR", help="the model in Hugging Face format")
    add(
        "--load",
        type=path_word,
        metavar="DIR",
        help="compare with the newest checkpoint here (default: the same folder, converted)",
    )
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="precision of both models")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto takes CUDA when there is one")
    add("--batch", type=within(int, SIZE), default=2, metavar="N", help="sequences at a time")
    add(
        "--batches",
        type=within(int, SIZE),
        default=1,
        metavar="N",
        help="first choices are counted over N batches, everything else over one",
    )
    add("--length", type=within(int, between(2, 2**27)), default=128, metavar="N", help="tokens per sequence")
    add(
        "--data-path",
        type=path_word,
        metavar="PREFIX",
        help="take the last tokens of this .bin/.idx dataset (default: random tokens)",
    )
    add("--seed", type=within(int, SEED), default=0, metavar="N", help="seed of the random tokens")
    add("--all-layers", action="store_true", help="print a row for every layer, not only the worst layer of each site")
    add(
        "--threshold",
        type=within(float, NOT_NEGATIVE),
        metavar="X",
        help="most ulps that logits may differ on average (default 100 in float32, where a sum's order shows, else 4)",
    )
    add(
        "--gradient-threshold",
        type=within(float, NOT_NEGATIVE),
        metavar="X",
        help="most that gradients may differ, relative to the largest of a parameter (default 1e-5 in float32, 0.05 in "
        "others)",
    )
    add("--output", type=path_word, metavar="PNG", help="draw the mean error of each site over the layers")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the tool; see the module."""
    setup_logging(0)
    return exit_code(lambda: run(build_parser().parse_args(argv)))


def run(args: argparse.Namespace) -> int:
    """Compares and prints; returns the exit code."""
    check_output("--output", args.output)
    ours = CheckpointSource(read_saved(args.load, None).path) if args.load else None
    parallel = ParallelConfig(device=args.device)
    groups, device = start_process(parallel, 0, 1, 0, 1)
    dtype: torch.dtype = getattr(torch, args.dtype)
    pair = ModelPair(Path(args.hf), dtype, groups, device, ours=ours)
    longest = pair.config.max_position_embeddings
    if longest and args.length > longest:
        raise ConfigError(f"--length {args.length} is above the model's {longest} positions")
    tokens, *further = read_tokens(args, pair.config.vocab_size).to(device)

    recorded, expected = pair.record(tokens)
    rows = differences(recorded, expected)
    print(HEADER)
    for row in rows if args.all_layers else worst(rows):
        print(line(row))
    choices = first_choices(recorded[-1, "logits"], expected[-1, "logits"])
    print(f"\n{describe(sum(map(pair.choices, further), choices))}")
    print("\nlogits with one operation computed as transformers computes it")
    for name, row in ablation(pair, tokens, expected[-1, "logits"]):
        print(f"{name:20s} {row.max_ulps:10.1f} {row.mean_ulps:11.4f} {row.differing:10.2%}")
    gradients = list(pair.gradients(tokens))
    name, worst_gradient = max(gradients, key=lambda item: item[1])
    print(f"\ngradients: largest relative difference {worst_gradient:.2e} ({name}) of {len(gradients)} parameters")
    if args.output:
        draw(rows, Path(args.output))
        print(f"picture: {args.output}")
    disconnect(groups.heartbeat)
    wide = dtype == torch.float32
    limit = args.gradient_threshold if args.gradient_threshold is not None else 1e-5 if wide else 0.05
    most_ulps = args.threshold if args.threshold is not None else 100.0 if wide else 4.0
    logits = rows[-1].mean_ulps
    failed = [
        text
        for text, value, most in (("logits, mean ulps", logits, most_ulps), ("gradients", worst_gradient, limit))
        if not value <= most
    ]
    print(f"differ by more than the threshold: {'; '.join(failed)}" if failed else "aligned")
    return 1 if failed else 0


def read_tokens(args: argparse.Namespace, vocab_size: int | None) -> torch.Tensor:
    """Returns tokens [batches, batch, length]: random, or the last of a dataset, which splits hold out. Raises
    ConfigError.
    """
    assert vocab_size
    shape = (args.batches, args.batch, args.length)
    count = math.prod(shape)
    if args.data_path is None:
        return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(args.seed))
    dataset, held = IndexedDataset(args.data_path), 0
    pieces: list[torch.Tensor] = []
    for sequence in reversed(range(len(dataset))):
        pieces.insert(0, torch.from_numpy(dataset.get(sequence).astype(np.int64)))
        held += len(pieces[0])
        if held >= count:
            break
    if held < count:
        raise ConfigError(
            f"--data-path {args.data_path} holds {held} tokens; {' x '.join(map(str, shape))} are asked for"
        )
    tokens = torch.cat(pieces)[-count:]
    if int(tokens.max()) >= vocab_size:
        raise ConfigError(
            f"--data-path {args.data_path} holds token {int(tokens.max())} and the model knows {vocab_size}; give a "
            "dataset of its own tokenizer"
        )
    return tokens.view(shape)


def describe(choices: Choices) -> str:
    """Formats one line."""
    other, share = choices.positions - choices.same, choices.same / choices.positions
    ties = f"; other: {other}, ties within {TIE} ulps among them: {choices.ties}" if other else ""
    return f"first choices: the same at {choices.same} of {choices.positions} positions ({share:.2%}){ties}"


def worst(rows: Sequence[SiteDifference]) -> list[SiteDifference]:
    """Returns the layer with the largest mean of each site, in the order of computation."""
    sites = dict.fromkeys(row.site for row in rows)
    return [max((row for row in rows if row.site == site), key=lambda row: row.mean_ulps) for site in sites]


def line(row: SiteDifference) -> str:
    """Formats a row of the table."""
    layer = "" if row.layer < 0 else str(row.layer)
    return f"{layer:>6s}  {row.site:11s} {row.max_ulps:10.1f} {row.mean_ulps:11.4f} {row.differing:10.2%}"


def draw(rows: Sequence[SiteDifference], path: Path) -> None:
    """Draws the mean ulps of each site over the layers."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    colors = matplotlib.colormaps["tab20"]
    sites = dict.fromkeys(row.site for row in rows if row.layer >= 0)
    for number, site in enumerate(sites):
        layers = [row for row in rows if row.site == site]
        axes.plot(
            [row.layer for row in layers], [row.mean_ulps for row in layers], ".-", color=colors(number), label=site
        )
    axes.set_xlabel("layer")
    axes.set_ylabel("mean error, ulps")
    axes.set_title("ours against transformers")
    figure.legend(loc="outside right upper", fontsize="small")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
