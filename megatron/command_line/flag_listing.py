"""Logs the flags of a run at start-up."""

from __future__ import annotations

import textwrap

from megatron.base.log import get_logger
from megatron.command_line.flag_parser import print_arguments
from megatron.config.run import RunConfig

log = get_logger(__name__)
_WIDTH = 120


def announce_flags(run: RunConfig) -> None:
    """Logs the given flags that ask for the default behaviour; with --print-flags also the value of every flag.

    Accepted flags without an effect are rows of the table that set-up prints.
    """
    if run.logging.print_flags:
        log.info("%s", print_arguments(run))
    if run.already:
        line = "given, and already in effect: " + ", ".join(run.already)
        log.info("%s", "\n".join(textwrap.wrap(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)))
