"""Options of NCCL's communicators: --nccl-communicator-config-path and --high-priority-stream-groups.

The file is YAML as Megatron-LM reads it: the names of groups, and options under each of them.

    dp_cp:
      cga_cluster_size: 2
      max_ctas: 16
    pp: {max_ctas: 2, net_name: IB}

A message occupies `min_ctas` to `max_ctas` thread blocks of the device, in clusters of up to `cga_cluster_size`. The
rest is left to the compute beside it. What is not given is NCCL's own choice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron.base.errors import ConfigError
from megatron.config.parallel import ParallelConfig
from megatron.config.stream_groups import GROUPS

_FLAG = "--nccl-communicator-config-path"
_LEAST_AND_MOST = {"cga_cluster_size": (0, 8), "min_ctas": (1, 64), "max_ctas": (1, 64)}  # NCCL's own limits
_NETWORKS = ("IB", "Socket")  # as NCCL spells them
_EXAMPLE = "'dp_cp: {max_ctas: 16}'"


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

        If several names of Megatron-LM mean the communicator, the later one in GROUPS takes precedence: the narrower
        one.
        """
        options = CommunicatorOptions()
        for name, meant in GROUPS.items():
            if name in self.named and not set(groups).isdisjoint(meant):
                options = dataclasses.replace(options, **self.named[name].given())
        return options

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
    where = f"{_FLAG} {path}"
    try:
        groups = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where} cannot be read ({error.strerror}); give a file") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{where} is not YAML ({problem}); write groups and options as {_EXAMPLE}") from error
    if not isinstance(groups or {}, dict):
        raise ConfigError(f"{where} holds no groups; write groups and options as {_EXAMPLE}")
    return {str(group): _options(where, group, options) for group, options in (groups or {}).items()}


def _options(where: str, group: object, options: object) -> CommunicatorOptions:
    if group not in GROUPS:
        raise ConfigError(f"{where}: no group is called {group}; give one of {', '.join(GROUPS)}")
    if not isinstance(options or {}, dict):
        raise ConfigError(f"{where}: {group} is {options!r}, not options; write {_EXAMPLE}")
    assert isinstance(options, dict | None)
    values = {name: _checked(f"{where}: {name} of {group}", name, value) for name, value in (options or {}).items()}
    least, most = values.get("min_ctas", 1), values.get("max_ctas", math.inf)
    if least > most:
        raise ConfigError(f"{where}: {group} has min_ctas {least} above max_ctas {most}; lower the first")
    return CommunicatorOptions(**values)


def _checked(where: str, name: object, value: object) -> Any:
    """Returns the value of an option. Raises ConfigError for a name or value that NCCL does not have."""
    if name in _LEAST_AND_MOST:
        least, most = _LEAST_AND_MOST[str(name)]
        if type(value) is not int or not least <= value <= most:
            raise ConfigError(f"{where} is {value!r}, not a whole number from {least} to {most}; change it")
        return value
    if name == "is_high_priority_stream":
        if not isinstance(value, bool):
            raise ConfigError(f"{where} is {value!r}, neither true nor false; change it")
        return value
    if name == "net_name":
        network = next((network_name for network_name in _NETWORKS if network_name.lower() == str(value).lower()), None)
        if network is None:
            raise ConfigError(f"{where} is {value!r}, not a network; give {' or '.join(_NETWORKS)}")
        return network
    names = ", ".join(option.name for option in dataclasses.fields(CommunicatorOptions))
    raise ConfigError(f"{where} is not an option of NCCL; give one of {names}")
