"""The profile of a machine: what tools/profile_machine.py measured, as a file that the planner reads.

The file is JSON with the fields of `MachineProfile` and of the rows of its tables, no more and no fewer. Names have
units.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from megatron.base.errors import ConfigError, shown
from megatron.config.model import RUNTIME_FIELDS, ModelConfig
from megatron.planner.search.layout import Layout

FORMAT = 1
EMBEDDING, HEAD = "embedding", "head"
# Names of messages besides those of megatron/spec/collectives.py: of buckets of parameters and gradients, and to a
# neighbouring pipeline rank.
BUCKET_GATHER, BUCKET_REDUCE_SCATTER, BUCKET_ALL_REDUCE = (
    "bucket_all_gather",
    "bucket_reduce_scatter",
    "bucket_all_reduce",
)
SEND = "send"
WHOLE_LAYER = "full"
# Flags of the model that say nothing about the shape of a layer.
_NO_SHAPE = {"num_layers", "max_position_embeddings", "make_vocab_size_divisible_by", *RUNTIME_FIELDS}
_SHAPE_TOO = ("fp32_residual_connection", "attention_backend", "transformer_impl")


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """A decoder layer of a microbatch on one rank, without its communication.

    layer: its number in the model. cp_kind: the context-parallel communication, with cp above 1. again_seconds:
    recomputed modules, joined by "+", or WHOLE_LAYER -> seconds that they add to backward. host_*: seconds that the
    host needs to queue the kernels, 0 on the CPU. spread: half the distance between the quartiles of the phases' sum,
    divided by the median.
    """

    layer: int
    tp: int
    sequence_parallel: bool
    tp_overlap: bool
    cp: int
    cp_kind: str
    micro_batch: int
    seq_length: int
    forward_seconds: float
    input_grad_seconds: float
    weight_grad_seconds: float
    host_forward_seconds: float
    host_backward_seconds: float
    again_seconds: Mapping[str, float]
    spread: float

    @property
    def layout(self) -> Layout:
        """The layout in which it was measured."""
        return Layout(
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            tp_overlap=self.tp_overlap,
            cp=self.cp,
            cp_kind=self.cp_kind,
            micro_batch=self.micro_batch,
        )


@dataclass(frozen=True, kw_only=True)
class EndRow:
    """The embedding, or the final norm with the head and the loss, of a microbatch on one rank, without
    communication."""

    end: str
    tp: int
    sequence_parallel: bool
    cp: int
    micro_batch: int
    seq_length: int
    forward_seconds: float
    input_grad_seconds: float
    weight_grad_seconds: float
    spread: float

    @property
    def layout(self) -> Layout:
        """The layout in which it was measured."""
        return Layout(tp=self.tp, sequence_parallel=self.sequence_parallel, cp=self.cp, micro_batch=self.micro_batch)


_Timed = TypeVar("_Timed", LayerRow, EndRow)


def scaled(row: _Timed, times: float) -> _Timed:
    """Returns the row with all of its times multiplied."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(row):
        if field.name.endswith("_seconds"):
            value = getattr(row, field.name)
            is_scalar = isinstance(value, float)
            changed[field.name] = times * value if is_scalar else {name: times * item for name, item in value.items()}
    return dataclasses.replace(row, **changed)


@dataclass(frozen=True, kw_only=True)
class ProductRow:
    """A product [m, k] x [k, n]; accumulates: into an fp32 sum."""

    m: int
    n: int
    k: int
    accumulates: bool
    seconds: float
    spread: float


@dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """Causal attention of whole sequences on one rank: forward, and backward alone."""

    micro_batch: int
    tokens: int
    heads: int
    groups: int
    head_dim: int
    forward_seconds: float
    backward_seconds: float
    spread: float


@dataclass(frozen=True, kw_only=True)
class MessageRow:
    """A collective or a message, when all groups of the world that are placed alike communicate at once.

    ranks: of a group. together: of them on one node. nbytes: of the whole tensor, for all_to_all and shift of a rank's
    part. interference: the part of the message's time that comes back when a computation hides it, which is then
    slower.
    """

    op: str
    ranks: int
    together: int
    nbytes: int
    seconds: float
    interference: float
    spread: float


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """A machine as it was measured.

    device: as the driver names it, or "cpu". devices_per_node: ranks that share a host. shape: the flags of the model
    that decide about its layers, where they differ from the default. left_out: what the time did not suffice for.
    processors: streaming multiprocessors, or cores of a rank. bytes_per_second: of memory-bound kernels. step_seconds:
    of a step that belong to no microbatch and no update. update: of the device's optimizer with norm and clipping;
    cpu_adam: of states in host memory. overlap: whether copies to and from the host are asynchronous is not measured,
    only their rate alone.
    """

    format: int
    project: str
    torch: str
    date: str
    device: str
    dtype: str
    world_size: int
    devices_per_node: int
    hosts: tuple[str, ...]
    threads: int
    processors: int
    memory_bytes: int
    shape: Mapping[str, Any]
    profile_seconds: float
    left_out: tuple[str, ...]
    bytes_per_second: float
    step_seconds: float
    update_parameters_per_second: float
    cpu_adam_parameters_per_second: float
    to_host_bytes_per_second: float
    to_device_bytes_per_second: float
    layers: tuple[LayerRow, ...]
    ends: tuple[EndRow, ...]
    products: tuple[ProductRow, ...]
    attention: tuple[AttentionRow, ...]
    messages: tuple[MessageRow, ...]

    @property
    def product_flops_per_second(self) -> float:
        """The rate of the fastest product."""
        return max(2.0 * row.m * row.n * row.k / row.seconds for row in self.products)

    def check_model(self, model: ModelConfig, path: str) -> None:
        """Raises ConfigError if layers of this model were not measured. path: of the profile, for the message."""
        dtype, measured_dtype = model.dtype_name, self.dtype
        if dtype != measured_dtype:
            raise ConfigError(
                f"--profile {path} was taken in {measured_dtype}, and the run is in {dtype}; {_TAKE_ANOTHER}"
            )
        shape = shape_of(model)
        differing = sorted(name for name in {*shape, *self.shape} if _plain(shape.get(name)) != self.shape.get(name))
        if differing:
            defaults = _defaults()
            differences = ", ".join(
                f"{name} {self.shape.get(name, defaults.get(name))} and not {shape.get(name, defaults.get(name))}"
                for name in differing[:4]
            )
            raise ConfigError(f"--profile {path} was taken with {differences}; {_TAKE_ANOTHER}")


_TAKE_ANOTHER = "take a profile of this run with tools/profile_machine.py"


def shape_of(model: ModelConfig) -> dict[str, Any]:
    """Returns the flags of a model that decide about its layers and ends, where they differ from the default."""
    defaults = _defaults()
    values = {name: getattr(model, name) for name in defaults} | {"padded_vocab_size": model.padded_vocab_size}
    return {name: value for name, value in values.items() if value != defaults.get(name)}


@cache
def _defaults() -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    shape_names = (names - _NO_SHAPE - {"vocab_size", "fixed_padded_vocab_size"}) | {*_SHAPE_TOO}
    return {name: getattr(ModelConfig(), name) for name in sorted(shape_names)}


def read_profile(path: str) -> MachineProfile:
    """Returns the profile in a file. Raises ConfigError with one line."""
    try:
        words = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_no_number)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--profile {path} is no JSON file: {' '.join(str(error).split())[:200]}; write it with "
            "tools/profile_machine.py"
        ) from None
    reader = _Reader(path)
    if isinstance(words, dict) and words.get("format") != FORMAT:
        raise reader.error(f"has format {shown(words.get('format'))}, and this version reads {FORMAT}")
    profile = reader.record(MachineProfile, words, "")
    for name in ("layers", "ends", "products", "messages"):
        if not getattr(profile, name) and (name != "messages" or profile.world_size > 1):
            raise reader.error(f"has no {name}")
    if profile.devices_per_node > profile.world_size:
        raise reader.error(
            f"has {profile.devices_per_node} devices_per_node and a world_size of {profile.world_size}, which is "
            "smaller"
        )
    return profile


def write_profile(profile: MachineProfile, path: str) -> None:
    """Writes a profile, one row of a table per line. Raises OSError."""
    words = dataclasses.asdict(profile)
    lines = []
    for name, value in words.items():
        if isinstance(value, tuple | list) and value and isinstance(value[0], dict):
            rows = ",\n  ".join(json.dumps(row, allow_nan=False) for row in value)
            lines.append(f'"{name}": [\n  {rows}\n ]')
        else:
            lines.append(f'"{name}": {json.dumps(value, allow_nan=False)}')
    Path(path).write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")


_Record = TypeVar("_Record")


class _Reader:
    """Turns JSON into dataclasses: every field must be there, nothing else, and of its type."""

    def __init__(self, path: str) -> None:
        self._path = path

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"--profile {self._path} {text}; {_TAKE_ANOTHER}")

    def record(self, cls: type[_Record], words: Any, where: str) -> _Record:
        if not isinstance(words, dict):
            raise self.error(f"has {shown(words)} for {where or 'all of it'}, which must be a table")
        hints = typing.get_type_hints(cls)
        for unknown in sorted(set(words) - set(hints)):
            raise self.error(f"has an unknown key {shown(_under(where, unknown))}")
        for missing in sorted(set(hints) - set(words)):
            raise self.error(f"has no {_under(where, missing)}")
        return cls(**{name: self._value(hint, words[name], _under(where, name)) for name, hint in hints.items()})

    def _value(self, hint: Any, value: Any, where: str) -> Any:
        origin = typing.get_origin(hint)
        if origin is tuple:
            (item_type, _) = typing.get_args(hint)
            if not isinstance(value, list):
                raise self.error(f"has {shown(value)} for {where}, which must be a list")
            return tuple(self._value(item_type, item, f"{where}[{number}]") for number, item in enumerate(value))
        if origin is not None and issubclass(origin, Mapping):
            (_, item_type) = typing.get_args(hint)
            if not isinstance(value, dict):
                raise self.error(f"has {shown(value)} for {where}, which must be a table")
            values = {key: self._value(item_type, item, _under(where, key)) for key, item in value.items()}
            return types.MappingProxyType(values)
        if dataclasses.is_dataclass(hint):
            return self.record(typing.cast(type[Any], hint), value, where)
        if hint in (int, float):
            return self._number(hint, value, where)
        if hint in (str, bool) and not isinstance(value, hint):
            raise self.error(f"has {shown(value)} for {where}, which must be {_NAMES[hint]}")
        return value

    def _number(self, hint: type[float], value: Any, where: str) -> float:
        right = isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
        if not right or not abs(value) < _TOO_LARGE:
            raise self.error(f"has {shown(value)} for {where}, which must be {_NAMES[hint]}")
        zero = where.split(".")[-1] in _MAY_BE_ZERO or "again_seconds" in where
        if value < 0 or (value == 0 and not zero):
            raise self.error(f"has {shown(value)} for {where}, which must be {'0 or more' if zero else 'above 0'}")
        if where.endswith("_per_second"):
            if value < 1:
                raise self.error(f"has {shown(value)} for {where}, which must be 1 or more")
        elif where.endswith("seconds") and value > _MOST_SECONDS:
            raise self.error(f"has {shown(value)} for {where}, which must be at most {_MOST_SECONDS}")
        return hint(value)


_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_TOO_LARGE = 1e30
_MOST_SECONDS = 1_000_000  # eleven days: a search that adds and compares such times does not come to an end
_MAY_BE_ZERO = {
    "layer",
    "input_grad_seconds",
    "weight_grad_seconds",
    "host_forward_seconds",
    "host_backward_seconds",
    "spread",
    "interference",
    "step_seconds",
}


def _under(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _plain(value: Any) -> Any:
    """The value as JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")
