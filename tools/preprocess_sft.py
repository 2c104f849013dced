"""Tokenizes instruction data in JSON lines, with marks for the tokens to train on, for finetune.py. See docs/sft.md."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from megatron.base.log import get_logger, setup_logging
from megatron.command_line.exits import exit_code
from megatron.command_line.flag_parser import FlagParser, within
from megatron.config.data import TokenizerConfig
from megatron.config.interval import SIZE
from megatron.core.datasets.sft_preprocess import SFTOptions, preprocess_sft
from megatron.core.datasets.tokenizer import build_tokenizer
from megatron.training.preprocess_flags import add_preprocess_flags

LOGGER = get_logger(__name__)


def build_parser() -> FlagParser:
    """Returns a parser of the tool's flags; the tokenizer's flags are those of training."""
    parser = FlagParser(description=__doc__, allow_abbrev=False)
    add_preprocess_flags(parser, writes="PREFIX.bin and .idx, PREFIX_mask.bin and .idx", records="conversations")
    add = parser.add_argument
    add(
        "--seq-length",
        type=within(int, SIZE),
        metavar="N",
        help="skip conversations with more tokens (default: keep all)",
    )
    add("--truncate", action="store_true", help="cut them to --seq-length tokens instead")
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns the exit code, see `exit_code`."""
    setup_logging(rank=0)
    return exit_code(lambda: run(build_parser().parse_args(argv)))


def run(namespace: argparse.Namespace) -> None:
    """Tokenizes, writes, and logs the result. Raises UserErrors."""
    args = vars(namespace)
    tokenizer_flags = {spec.name: args.pop(spec.name) for spec in dataclasses.fields(TokenizerConfig)}
    tokenizer = build_tokenizer(TokenizerConfig(**tokenizer_flags), None)
    done = preprocess_sft(SFTOptions(input=tuple(args.pop("input")), **args), tokenizer)
    LOGGER.info(
        "wrote %d conversations, %d tokens, %d of them trained on, from %.1f MB in %.1f s (%.2f MB/s)",
        done.conversations,
        done.tokens,
        done.trained,
        done.bytes / 1e6,
        done.seconds,
        done.bytes / 1e6 / done.seconds,
    )
    if done.dropped or done.truncated:
        LOGGER.info(
            "longer than --seq-length %d: %d left out, %d cut", args["seq_length"], done.dropped, done.truncated
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
