"""JSON lines -> Megatron's `.bin/.idx` files. See docs/data.md."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from megatron.base.errors import ConfigError
from megatron.base.log import get_logger, setup_logging
from megatron.command_line.exits import exit_code
from megatron.command_line.flag_parser import FlagParser, within
from megatron.config.data import TokenizerConfig
from megatron.config.interval import SIZE, WORKERS
from megatron.core.datasets.preprocess import PreprocessOptions, preprocess
from megatron.core.datasets.tokenizer import build_tokenizer
from megatron.training.preprocess_flags import add_preprocess_flags

LOGGER = get_logger(__name__)


def build_parser() -> FlagParser:
    """Returns a parser with the flags of Megatron-LM's tool of the same name; the tokenizer's flags are those of
    training.
    """
    parser = FlagParser(description=__doc__, allow_abbrev=False)
    add_preprocess_flags(parser, writes="PREFIX_KEY_document.bin and .idx", records="documents")
    add = parser.add_argument
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys whose text to tokenize (default: text)")
    add("--append-eod", action="store_true", help="end each document that is not empty with the eod token")
    add(
        "--partitions",
        type=within(int, WORKERS),
        default=1,
        metavar="N",
        help="distribute documents over N parts in turn and write the parts one after another, as in Megatron-LM "
        "(default 1; it does not change the speed, --workers does)",
    )
    add("--keep-sequential-samples", action="store_true", help="keep the input's order whatever --partitions is")
    add(
        "--vocab-size",
        type=within(int, SIZE),
        metavar="N",
        help="vocabulary of NullTokenizer; limits that of TikTokenizer",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns the exit code, see `exit_code`."""
    setup_logging(rank=0)
    return exit_code(lambda: run(build_parser().parse_args(argv)))


def run(namespace: argparse.Namespace) -> None:
    """Tokenizes and writes; logs the result. Raises UserErrors."""
    args = vars(namespace)
    tokenizer_flags = {spec.name: args.pop(spec.name) for spec in dataclasses.fields(TokenizerConfig)}
    if tokenizer_flags["chat_template"] is not None:
        raise ConfigError(
            "--chat-template has no effect on documents; give it to tools/preprocess_sft.py, or remove it"
        )
    config = TokenizerConfig(**tokenizer_flags).with_type_of_files()
    special = config.tokenizer_hf_include_special_tokens
    tokenizer = build_tokenizer(config, args.pop("vocab_size"), special_tokens=special)
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in args.items()}
    summary = preprocess(PreprocessOptions(**values), tokenizer)
    LOGGER.info(
        "wrote %d documents, %d tokens from %.1f MB in %.1f s (%.2f MB/s)",
        summary.documents,
        summary.tokens,
        summary.bytes / 1e6,
        summary.seconds,
        summary.bytes / 1e6 / summary.seconds,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
