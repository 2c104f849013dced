"""The memory of the engine for tokens that are already read: tensors with one row per running sequence.

Their columns are those of slots.py. A layer whose queries see all keys has every column (`SlotCache`), one with a
sliding window only the last ones (`WindowCache`), and one with a gated delta rule none: it has a state (`SlotStates`).

[Note: columns of a window] A layer with a window of W keys has W columns and some more, WINDOW_SLACK of the
specification. Its last column moves on with that of the batch. Where its memory ends, the last W - 1 columns are moved
to the beginning. So a step reads the keys of the window where they are, in their order, and each is copied once in as
many steps as there are further columns. Moves of the whole batch only change the number of the first column, unless
there are fewer columns than a longer prompt needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.transformer.context import Build
from megatron.core.transformer.moe.microbatch import MicrobatchRouting
from megatron.spec.attention import CoreSpec
from megatron.spec.delta_net import DeltaCoreSpec
from megatron.spec.moe import RouterSpec


@dataclass
class CachePlace:
    """The columns that the next forward writes and reads; one object shared by the caches of all layers."""

    rows: slice
    new: slice  # columns that are written
    seen: slice  # columns that are attended to, including the new ones
    padding: Tensor | None = None  # [new columns, rows]: True where a new column holds no token of the row

    @property
    def from_start(self) -> bool:
        """Whether the new columns hold sequences from their first token."""
        return self.new == self.seen

    def without_padding(self, x: Tensor) -> Tensor:
        """Returns x [new columns, rows, ...], with zeros where it is padding."""
        if self.padding is None:
            return x
        return x.masked_fill(self.padding.view(*self.padding.shape, *[1] * (x.dim() - 2)), 0)


class CacheColumns:
    """Tensors [capacity, rows, ...] of the tokens in the columns."""

    def __init__(self, place: CachePlace, tensors: Sequence[Tensor]) -> None:
        self._place, self._tensors = place, tensors

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def move_columns(self, rows: int, used: slice, by: int) -> None:
        """Moves the used columns of the first `rows` rows, to the left if `by` is negative."""
        for tensor in self._tensors:
            tensor[used.start + by : used.stop + by, :rows] = tensor[used, :rows].clone()

    def move_row(self, source: int, target: int, used: slice) -> None:
        """Copies a row's used columns over those of another and clears it, so that no value of it, such as a NaN,
        remains.
        """
        for tensor in self._tensors:
            if source != target:
                tensor[used, target] = tensor[used, source]
            tensor[used, source] = 0


def key_value_tensors(columns: int, rows: int, core: CoreSpec, build: Build) -> tuple[Tensor, Tensor]:
    """Returns keys [columns, rows, groups/tp, qk_dim] and values [.., v_dim]: zeros and not uninitialised memory, because
    a masked column is multiplied by a weight of zero, and zero times NaN is NaN."""
    heads = core.local_groups(build.groups.tp.size)
    keys, values = (
        torch.zeros(columns, rows, heads, channels, dtype=build.dtype, device=build.device)
        for channels in (core.qk_dim, core.v_dim)
    )
    return keys, values


class SlotCache(CacheColumns):
    """The keys [capacity, rows, groups/tp, qk_dim] and values [.., v_dim] of one layer: a `KeyValueCache`."""

    def __init__(self, capacity: int, rows: int, core: CoreSpec, build: Build, place: CachePlace) -> None:
        self._keys, self._values = key_value_tensors(capacity, rows, core, build)
        super().__init__(place, (self._keys, self._values))

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k, v [new columns, rows, groups/tp, channels] to the columns of the next forward, and zeros where they
        are padding; returns the columns that it reads.
        """
        place = self._place
        self._keys[place.new, place.rows] = place.without_padding(k)
        self._values[place.new, place.rows] = place.without_padding(v)
        return self._keys[place.seen, place.rows], self._values[place.seen, place.rows]


class _WholeRows(CacheColumns):
    """Tensors whose first dim is not the columns of the batch."""

    def move_row(self, source: int, target: int, used: slice) -> None:
        """See CacheColumns. All that a row has is copied and cleared."""
        super().move_row(source, target, slice(None))


class WindowCache(_WholeRows):
    """As `SlotCache`, for a layer with a sliding window: see [Note: columns of a window]."""

    def __init__(self, capacity: int, rows: int, core: CoreSpec, build: Build, place: CachePlace) -> None:
        assert core.window is not None
        self._window, self._columns = core.window, core.cached_columns(capacity)
        self._first = 0  # the column of the batch that is the first one here
        super().__init__(place, key_value_tensors(self._columns, rows, core, build))

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As that of SlotCache. Returns the columns of the window only, and k and v themselves where sequences begin."""
        place = self._place
        k, v = place.without_padding(k), place.without_padding(v)
        if place.new.stop - self._first > self._columns:
            self._move(place.rows, place.new.start - self._first, self._window - 1)
        stop, count = place.new.stop - self._first, min(len(k), self._window)
        for tensor, x in zip(self._tensors, (k, v), strict=True):
            tensor[stop - count : stop, place.rows] = x[len(x) - count :]
        if place.from_start:
            return k, v
        seen = slice(max(stop - self._window, place.seen.start - self._first), stop)
        keys, values = (tensor[seen, place.rows] for tensor in self._tensors)
        return keys, values

    def move_columns(self, rows: int, used: slice, by: int) -> None:
        """See CacheColumns. Afterwards a prompt of as many tokens as there are columns in use has room."""
        stop = used.stop - self._first
        needed = min(used.stop + by, self._window)
        self._first += by
        if stop < needed:
            self._move(slice(0, rows), stop, needed, min(used.stop - used.start, stop))

    def _move(self, rows: slice, stop: int, target: int, count: int | None = None) -> None:
        """Moves the `count` columns before `stop`, by default `target`, to those before `target`."""
        count = target if count is None else count
        for tensor in self._tensors:
            tensor[target - count : target, rows] = tensor[stop - count : stop, rows].clone()
        self._first += stop - target


class SlotStates(_WholeRows):
    """The states of one layer with a gated delta rule, and the last inputs of its convolution: a `StateCache`."""

    def __init__(
        self, rows: int, window: tuple[int, int], state: tuple[int, int, int], build: Build, place: CachePlace
    ) -> None:
        """window: inputs and their channels on this rank. state: heads on this rank, d_k and d_v."""
        inputs, channels = window
        self._window = torch.zeros(inputs, rows, channels, dtype=build.dtype, device=build.device)
        self._state = torch.zeros(1, rows, *state, dtype=torch.float32, device=build.device)
        super().__init__(place, (self._window, self._state))

    def load(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See StateCache."""
        place = self._place
        x = place.without_padding(x)
        if place.from_start:
            return x, None, None
        return x, self._window[:, place.rows], self._state[0, place.rows]

    def store(self, window: Tensor, state: Tensor) -> None:
        """See StateCache."""
        self._window[:, self._place.rows] = window
        self._state[0, self._place.rows] = state

    def move_columns(self, rows: int, used: slice, by: int) -> None:
        """See CacheColumns. A state has none."""


def layer_cache(
    core: CoreSpec | DeltaCoreSpec, slots: int, capacity: int, build: Build, place: CachePlace
) -> SlotCache | WindowCache | SlotStates:
    """Returns the cache of a layer for so many sequences of up to `capacity` tokens."""
    if isinstance(core, DeltaCoreSpec):
        tp = build.groups.tp.size
        window = core.taps - 1, core.key_heads // tp * core.convolved
        return SlotStates(slots, window, (core.value_heads // tp, core.qk_dim, core.v_dim), build, place)
    kind = SlotCache if core.cached_columns(capacity) == capacity else WindowCache
    return kind(capacity, slots, core, build, place)


class SlotExperts(CacheColumns):
    """The experts [capacity, rows, layers, k], int16, that this rank's layers choose for the tokens in the columns."""

    def __init__(
        self, capacity: int, rows: int, routers: Mapping[int, RouterSpec], device: torch.device, place: CachePlace
    ) -> None:
        """routers: of these layers."""
        self._layers = tuple(routers)
        topk = max(router.topk for router in routers.values())
        self._experts = torch.zeros(capacity, rows, len(routers), topk, dtype=torch.int16, device=device)
        super().__init__(place, (self._experts,))

    def routing(self, columns: int) -> MicrobatchRouting:
        """Returns the collector of the choices of the next forward, of this many columns."""
        return MicrobatchRouting(torch.arange(columns, device=self._experts.device), None, None, choices={})

    def append(self, routing: MicrobatchRouting) -> None:
        """Writes the choices of a forward to its columns."""
        place, choices = self._place, routing.choices
        assert choices is not None
        experts = torch.stack([choices[number] for number in self._layers], dim=1)
        self._experts[place.new, place.rows] = experts.unflatten(0, (len(routing.places), -1))

    def of_row(self, row: int, used: slice) -> Tensor:
        """Returns a row's used columns [columns, layers, k] in host memory."""
        return self._experts[used, row].to("cpu", copy=True)
