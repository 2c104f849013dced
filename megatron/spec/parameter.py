"""A parameter as data: its global shape, how it is sharded, and its initial values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")  # a tensor

SEQUENCE, HEADS, CHANNELS = "sequence", "heads", "channels"
LEAST_RATE = 0.01  # the least number whose logarithm is an initial value
LEAST_STEP = 0.001


@dataclass(frozen=True)
class Init:
    """Initial values: normal(0, scale), uniform(-scale, scale), the constant `scale`, `scale` x Xavier-uniform, the
    logarithm of uniform(LEAST_RATE, scale), or numbers whose softplus is log-uniform between LEAST_STEP and scale.

    Xavier (Glorot and Bengio, 2010) takes fan-in and fan-out from the global weight, so it does not depend on the
    layout.
    """

    kind: str  # "normal", "uniform", "constant", "xavier", "log_uniform" or "softplus"
    scale: float

    def for_shape(self, global_shape: tuple[int, ...]) -> Init:
        """Resolves "xavier" to uniform values: the bound is sqrt(6 / (fan-in + fan-out)), the last dim is the
        inputs."""
        if self.kind != "xavier":
            return self
        fan_out, fan_in = math.prod(global_shape[:-1]), global_shape[-1]
        return Init("uniform", self.scale * math.sqrt(6.0 / (fan_in + fan_out)))


class Shard(NamedTuple):
    """The dim of a parameter that an axis of the mesh shards."""

    axis: str
    dim: int


@dataclass(frozen=True)
class ParamSpec:
    """A parameter of the global model.

    shards: the axes of the mesh that shard it, each along a dim of its own; without any, every rank holds all of it.
    own_rows: see `shard`; only of a parameter with one axis. stacked: dim 0 counts weights that are initialised each as
    a parameter of its own. input_sharding: for a parameter that every rank holds, how the activations it is applied to
    are sharded over tp: not at all (None), by SEQUENCE (with sequence parallelism only), by HEADS or by CHANNELS. Where
    they are sharded, each rank computes a part of the gradient, and the parts are summed after the backward. decay:
    weight decay applies. embedding_or_output: of the word embeddings or of the output layer, with a row for each token;
    it has the learning rate of --decoupled-lr.
    """

    shape: tuple[int, ...]
    init: Init = field(compare=False)
    shards: tuple[Shard, ...] = ()
    own_rows: int | None = None
    stacked: bool = field(default=False, compare=False)
    input_sharding: str | None = field(default=None, compare=False)
    decay: bool = field(default=True, compare=False)
    embedding_or_output: bool = field(default=False, compare=False)

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        return math.prod(self.shape)

    @property
    def axis(self) -> str | None:
        """The first axis that shards it, which decides on the view of the mesh; None if every rank holds all of it."""
        return self.shards[0].axis if self.shards else None

    @property
    def initial(self) -> Init:
        """Initial values without "xavier"."""
        return self.init.for_shape(self.shape[1:] if self.stacked else self.shape)

    def reduce_axes(self, *, sequence_parallel: bool) -> tuple[str, ...]:
        """Axes over whose ranks the partial gradients of a replicated parameter are summed."""
        partial = self.input_sharding in (HEADS, CHANNELS) or (self.input_sharding == SEQUENCE and sequence_parallel)
        return ("tp",) if partial else ()


@dataclass(frozen=True)
class Section:
    """Consecutive elements of a parameter's local tensor that are one rectangle of the global tensor.

    start: its first element in the flattened local piece. offset, shape: the rectangle. holders: the number of
    neighbouring ranks that hold these elements, 1 where they are sharded. partial: each holder computes only a part of
    the gradient.
    """

    start: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    holders: int
    partial: bool

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def of(self, local: T) -> T:
        """The section of a contiguous local tensor, in its shape: a view."""
        flat: Any = local
        view: T = flat.view(-1)[self.start : self.start + self.numel].view(self.shape)
        return view


def shard(
    shape: tuple[int, ...], size: int, rank: int, dim: int, own_rows: int | None = None
) -> tuple[tuple[int, ...], tuple[Section, ...]]:
    """(local shape, sections) of a rank's piece of a tensor that is sharded along `dim` over `size` ranks.

    The dim's length must be a multiple of `size`. With `own_rows`, for dim 0, it may also be a divisor of it. Then size
    / length neighbours share an index of dim 0: each has its equal part of the first `own_rows` rows of the next dim,
    and all of them hold the rows that follow. So tensor-parallel ranks share the keys and values of a group of heads.
    """
    length = shape[dim]
    if own_rows is None or length >= size:
        assert length % size == 0, f"{shape} cannot be sharded along dim {dim} over {size} ranks"
        local = (*shape[:dim], length // size, *shape[dim + 1 :])
        offset = tuple(local[dim] * rank if d == dim else 0 for d in range(len(local)))
        return local, (Section(0, offset, local, holders=1, partial=False),)
    holders = size // length
    assert dim == 0 and size % length == 0 and own_rows % holders == 0
    index, place = divmod(rank, holders)
    rows, inner = shape[1], shape[2:]
    divided_rows, zeros = own_rows // holders, (0,) * len(inner)
    shared = Section(
        divided_rows * math.prod(inner),
        (index, own_rows, *zeros),
        (1, rows - own_rows, *inner),
        holders=holders,
        partial=True,
    )
    divided = Section(0, (index, place * divided_rows, *zeros), (1, divided_rows, *inner), holders=1, partial=False)
    sections = tuple(section for section in (divided, shared) if section.numel)
    return (1, divided_rows + rows - own_rows, *inner), sections


def piece_of(
    parameter: ParamSpec, sizes: Mapping[str, int], ranks: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[Section, ...]]:
    """(local shape, sections) of a rank's piece of a sharded parameter, by the size of each axis and the rank along
    it."""
    if len(parameter.shards) == 1:
        ((axis, dim),) = parameter.shards
        return shard(parameter.shape, sizes[axis], ranks[axis], dim, parameter.own_rows)
    shape, offset = parameter.shape, (0,) * len(parameter.shape)
    for axis, dim in parameter.shards:
        shape, (section,) = shard(shape, sizes[axis], ranks[axis], dim)
        offset = tuple(a + b for a, b in zip(offset, section.offset, strict=True))
    return shape, (Section(0, offset, shape, holders=1, partial=False),)


def local_shape(parameter: ParamSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of a rank's piece, by the size of each axis that shards the parameter; the same on all ranks."""
    return piece_of(parameter, sizes, dict.fromkeys(sizes, 0))[0]


def local_numel(parameter: ParamSpec, sizes: Mapping[str, int]) -> int:
    """Elements of a rank's piece; see `local_shape`."""
    return math.prod(local_shape(parameter, sizes))
