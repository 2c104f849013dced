"""Print docs/flags.md: every flag by group, with its type, default and help. Run: tools/flags_table.py >
docs/flags.md"""

from __future__ import annotations

import sys
import textwrap
import typing
from dataclasses import Field
from typing import Any

from megatron.command_line.flag_parser import GROUP_TITLES, plain_type, spellings_of
from megatron.config.flag import flag_of
from megatron.config.presets import PRESETS
from megatron.config.run import PARTS, flag_fields

HEADER = """# Flags

Generated from the dataclasses in `megatron/config`; do not edit. To update, run
`python tools/flags_table.py > docs/flags.md`.

Names follow Megatron-LM; what becomes of its flags that are not here is told in [migrating.md](migrating.md). A switch
takes no value. `--preset NAME` sets the shape of a published model, and other flags win over it:
{presets}
"""


def table() -> str:
    """Returns the whole page as Markdown, with a final newline."""
    presets = textwrap.fill(", ".join(f"`{name}`" for name in PRESETS) + ".", 120, break_on_hyphens=False)
    lines = [HEADER.format(presets=presets)]
    for part, cls in PARTS.items():
        lines += [f"## {_heading(GROUP_TITLES[part])}", "", "| flag | type | default | help |", "|---|---|---|---|"]
        hints = typing.get_type_hints(cls)
        lines += [_row(spec, hints[spec.name]) for holder, spec in flag_fields().values() if holder == part]
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _heading(title: str) -> str:
    return title[0].upper() + title[1:]


def _row(spec: Field[Any], hint: Any) -> str:
    properties = flag_of(spec)
    assert properties is not None
    names = ", ".join(f"`{name}`" for name in spellings_of(spec))
    choices = properties.choices
    if choices and properties.metavar and properties.metavar.startswith("{"):  # a short form of many choices
        choices = tuple(properties.metavar.strip("{}").split(","))
    cells = [names, _kind(plain_type(hint), choices, properties.nargs), _default(spec.default), properties.help]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(value: Any) -> str:
    """Formats a default as it would be typed."""
    if value is None or isinstance(value, bool):
        return ""
    return f"`{' '.join(map(str, value))}`" if isinstance(value, tuple) else f"`{value}`"


def _kind(kind: Any, choices: tuple[Any, ...] | None, nargs: str | int | None) -> str:
    if kind is bool:
        return "switch"
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    if typing.get_origin(kind) is tuple:
        count = nargs if isinstance(nargs, int) else "several"
        return f"{count} x {typing.get_args(kind)[0].__name__}"
    return str(kind.__name__)


if __name__ == "__main__":
    sys.stdout.write(table())
