"""Instruction data in JSON lines -> tokens and which of them to train on, for finetune.py. See docs/sft.md."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from megatron.config.data import TokenizerConfig
from megatron.core.datasets.sft_preprocess import SFTOptions, preprocess_sft
from megatron.core.datasets.tokenizer import build_tokenizer
from megatron.core.errors import USER_ERROR_EXIT_CODE, UserError
from megatron.core.log import get_logger, setup_logging
from megatron.training.arguments import FlagParser, add_config

LOGGER = get_logger(__name__)


def build_parser() -> FlagParser:
    """The tokenizer's flags are those of training."""
    parser = FlagParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help=".jsonl or .jsonl.gz files, or quoted patterns")
    add("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin and .idx, PREFIX_mask.bin and .idx")
    add("--workers", type=int, required=True, metavar="N", help="processes that tokenize; one writes besides")
    add("--seq-length", type=int, metavar="N", help="leave out conversations with more tokens (default: keep all)")
    add("--truncate", action="store_true", help="cut them to --seq-length tokens instead")
    add("--chat-template", metavar="FILE", help="a Jinja template in place of the tokenizer's own")
    add("--log-interval", type=int, default=1000, metavar="N", help="conversations between progress lines (1000)")
    add_config(parser, TokenizerConfig)
    return parser


def main(argv: Sequence[str]) -> int:
    """0, or 2 after one line on stderr for a mistake of the user's."""
    setup_logging(rank=0)
    try:
        args = vars(build_parser().parse_args(argv))
        tokenizer_flags = {spec.name: args.pop(spec.name) for spec in dataclasses.fields(TokenizerConfig)}
        tokenizer = build_tokenizer(TokenizerConfig(**tokenizer_flags), None)
        done = preprocess_sft(SFTOptions(input=tuple(args.pop("input")), **args), tokenizer)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
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
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
