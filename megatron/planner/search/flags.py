"""The command line of a layout."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from megatron.config.run import RunConfig, flag_name
from megatron.planner.search.layout import FIELDS, Layout

WIDTH = 100  # of the lines of a command


def flags_of(layout: Layout, run: RunConfig) -> list[str]:
    """Returns the words that a command line needs in addition to the run's flags that no axis sets, to be in this
    layout.

    Flags at their default are left out.
    """
    applied = layout.apply(run)
    words: list[str] = []
    for name in FIELDS:
        if name in applied.given:
            words += [flag_name(name), *_words(applied.value(name))]
    return words


def command_of(words: Sequence[str], world_size: int, ranks_per_node: int, script: str = "pretrain_gpt.py") -> str:
    """Returns the command that starts a script with these words on every node, in lines of a shell.

    Several nodes need to know each other: NODE_RANK and MASTER_ADDR are variables of the shell then.
    """
    nodes = -(-world_size // ranks_per_node)
    start = ["torchrun", "--nproc-per-node", str(min(world_size, ranks_per_node))]
    if nodes > 1:
        start += ["--nnodes", str(nodes), "--node-rank", "$NODE_RANK", "--master-addr", "$MASTER_ADDR"]
    groups = [" ".join([*start, script])]
    for word in words:
        if word.startswith("--"):
            groups.append(shlex.quote(word))
        else:
            groups[-1] += f" {shlex.quote(word)}"
    lines = [groups[0]]
    for group in groups[1:]:
        if len(lines) > 1 and len(lines[-1]) + 1 + len(group) <= WIDTH:
            lines[-1] += f" {group}"
        else:
            lines.append(f"    {group}")
    return " \\\n".join(lines)


def _words(value: Any) -> list[str]:
    """The words after a flag. A switch has none."""
    if isinstance(value, bool):
        return []
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return [f"{value:g}" if isinstance(value, float) else str(value)]
