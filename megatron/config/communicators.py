"""Options of NCCL's communicators: --nccl-communicator-config-path and --high-priority-stream-groups.

The file is YAML as Megatron-LM reads it, restricted to what such a file needs: the names of groups, and under each of them
options with plain values, on lines of their own or in braces.

    dp_cp:
      cga_cluster_size: 2
      max_ctas: 16
    pp: {max_ctas: 2, net_name: IB}

A message occupies `min_ctas` to `max_ctas` thread blocks of the device, in clusters of up to `cga_cluster_size`. The rest is
left to the compute beside it. What is not given is NCCL's own choice.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.base.errors import ConfigError
from megatron.config.parallel import ParallelConfig
from megatron.config.stream_groups import GROUPS

Value = int | bool | str
_FLAG = "--nccl-communicator-config-path"
_LEAST_AND_MOST = {"cga_cluster_size": (0, 8), "min_ctas": (1, 64), "max_ctas": (1, 64)}  # NCCL's own limits
_NETWORKS = ("IB", "Socket")  # as NCCL spells them
_WORD = r"[A-Za-z_][\w-]*"
_PAIR = re.compile(rf"({_WORD})\s*:\s+(\S.*)")
_BRACES = re.compile(rf"({_WORD})\s*:\s*\{{(.*)\}}")
_NAME = re.compile(rf"({_WORD})\s*:")


@dataclass(frozen=True, kw_only=True)
class CommunicatorOptions:
    """Options of one communicator, under NCCL's names. None leaves the choice to NCCL.

    is_high_priority_stream: None leaves it to core/groups.py.
    """

    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None
    is_high_priority_stream: bool | None = None

    def given(self) -> dict[str, Any]:
        """Returns the options that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class CommunicatorSettings:
    """The options of every group that the flags name, by Megatron-LM's names of groups (config/stream_groups.py)."""

    named: Mapping[str, CommunicatorOptions] = field(default_factory=dict)

    def of(self, groups: Collection[str]) -> CommunicatorOptions:
        """Returns the options of a communicator that serves these groups, by their names in core/groups.py.

        If several names of Megatron-LM mean the communicator, the later one in GROUPS takes precedence: the narrower one.
        """
        found = CommunicatorOptions()
        for name, meant in GROUPS.items():
            if name in self.named and not set(groups).isdisjoint(meant):
                found = dataclasses.replace(found, **self.named[name].given())
        return found

    @property
    def without_group(self) -> list[str]:
        """The names of groups of Megatron-LM that no run has here."""
        return [name for name in self.named if not GROUPS[name]]


def communicator_settings(parallel: ParallelConfig) -> CommunicatorSettings:
    """Returns what the flags and the file ask for. Raises ConfigError."""
    path = parallel.nccl_communicator_config_path
    named = {} if path is None else _read(Path(path))
    for name in parallel.high_priority_stream_groups:
        named[name] = dataclasses.replace(named.get(name, CommunicatorOptions()), is_high_priority_stream=True)
    return CommunicatorSettings(named)


def _read(path: Path) -> dict[str, CommunicatorOptions]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{_FLAG} {path} cannot be read ({error.strerror}); give a file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_FLAG} {path} is not text; give a YAML file of groups and options") from error
    options: dict[str, dict[str, Any]] = {}
    for number, group, pair in _lines(path, text):
        where = f"{_FLAG} {path}, line {number}"
        if group not in GROUPS:
            raise ConfigError(f"{where}: no group is called {group}; give one of {', '.join(GROUPS)}")
        if pair is None:
            if group in options:
                raise ConfigError(f"{where}: {group} stands there twice; write its options in one place")
            options[group] = {}
        else:
            name, value = pair
            if name in options[group]:
                raise ConfigError(f"{where}: {name} of {group} stands there twice; remove one")
            options[group][name] = _checked(where, name, value)
    for group, found in options.items():
        least, most = found.get("min_ctas", 1), found.get("max_ctas", math.inf)
        if least > most:
            raise ConfigError(f"{_FLAG} {path}: {group} has min_ctas {least} above max_ctas {most}; lower the first")
    return {group: CommunicatorOptions(**found) for group, found in options.items()}


def _lines(path: Path, text: str) -> Iterator[tuple[int, str, tuple[str, str] | None]]:
    """Yields (line number, group, None) where a group begins, and (line number, group, (option, value)) of its options."""
    group: str | None = None
    for number, full in enumerate(text.splitlines(), start=1):
        line = re.sub(r"(^|\s)#.*", "", full).rstrip()
        if not line or (line == "---" and group is None):
            continue
        where, inner = f"{_FLAG} {path}, line {number}", line.lstrip(" ")
        if inner != line:
            found = _PAIR.fullmatch(inner)
            if group is None or found is None:
                raise ConfigError(
                    f"{where}: {full.strip()!r} is not an option of a group; write 'max_ctas: 16' below one"
                )
            yield number, group, (found[1], found[2])
        elif braces := _BRACES.fullmatch(line):
            group = braces[1]
            yield number, group, None
            for part in filter(None, map(str.strip, braces[2].split(","))):
                found = _PAIR.fullmatch(part)
                if found is None:
                    raise ConfigError(f"{where}: {part!r} is not an option; write 'max_ctas: 16'")
                yield number, group, (found[1], found[2])
        elif name := _NAME.fullmatch(line):
            group = name[1]
            yield number, group, None
        else:
            raise ConfigError(f"{where}: {full.strip()!r} is not the name of a group; write 'dp_cp:'")


def _checked(where: str, name: str, word: str) -> Value:
    """Returns the value of an option. Raises ConfigError for a name or value that NCCL does not have."""
    word = word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'" else word
    if name in _LEAST_AND_MOST:
        least, most = _LEAST_AND_MOST[name]
        if not re.fullmatch(r"\d{1,9}", word) or not least <= int(word) <= most:
            raise ConfigError(f"{where}: {name} {word} is not a whole number from {least} to {most}; change it")
        return int(word)
    if name == "is_high_priority_stream":
        if word.lower() not in ("true", "false"):
            raise ConfigError(f"{where}: {name} {word} is neither true nor false; change it")
        return word.lower() == "true"
    if name == "net_name":
        network = next((each for each in _NETWORKS if each.lower() == word.lower()), None)
        if network is None:
            raise ConfigError(f"{where}: net_name {word} is not a network; give {' or '.join(_NETWORKS)}")
        return network
    known = ", ".join(each.name for each in dataclasses.fields(CommunicatorOptions))
    raise ConfigError(f"{where}: no option is called {name}; give one of {known}")
