"""What a run says about its flags at the start."""

from __future__ import annotations

import textwrap

from megatron.base.log import get_logger
from megatron.command_line.arguments import print_arguments
from megatron.config.run import RunConfig

log = get_logger(__name__)
_WIDTH = 120


def announce_flags(run: RunConfig) -> None:
    """The flags that were given and ask for what every run does; with --print-flags the value of every flag, too.

    Flags that are accepted without an effect are rows of the table that set-up prints.
    """
    if run.logging.print_flags:
        log.info("%s", print_arguments(run))
    if run.already:
        line = "given and already so: " + ", ".join(run.already)
        log.info("%s", "\n".join(textwrap.wrap(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)))
