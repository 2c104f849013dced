"""The common flags of the preprocessing tools."""

from __future__ import annotations

from megatron.command_line.flag_parser import FlagParser, add_config, path_word, within
from megatron.config.data import TokenizerConfig
from megatron.config.interval import COUNT, WORKERS
from megatron.core.datasets.preprocess import ON_ERROR


def add_preprocess_flags(parser: FlagParser, *, writes: str, records: str) -> None:
    """Adds flags for input, output, workers, bad records and progress, and the tokenizer's flags of training.

    `writes` is the names of the output files. `records` is the plural name of an input line's content.
    """
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        type=path_word,
        required=True,
        metavar="FILE",
        help=".jsonl or .jsonl.gz files, or quoted patterns",
    )
    add("--output-prefix", type=path_word, required=True, metavar="PREFIX", help=f"writes {writes}")
    add(
        "--workers",
        type=within(int, WORKERS),
        required=True,
        metavar="N",
        help="processes that tokenize; one more process writes",
    )
    add(
        "--on-error",
        default="stop",
        choices=ON_ERROR,
        help=f"skip leaves {records} that cannot be used out and counts them",
    )
    add(
        "--log-interval",
        type=within(int, COUNT),
        default=1000,
        metavar="N",
        help=f"{records} between progress lines (default 1000)",
    )
    add_config(parser, TokenizerConfig)
