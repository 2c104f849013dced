"""How the tensors of some families are in files: under names of their own, transposed, with further dims of 1, or
with gates and ups in turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from megatron.base.box import Box


@dataclass(frozen=True)
class StoredTensors:
    """names: (a part of the names that most families have, what a file has in its place), in the order in which they
    are replaced. prefix: what the names in a file begin with, which all may lack. transposed: ends of their names, as
    in files, of weights that are stored as [in, out], or as [experts, in, out]. interleaved: ends of the names of
    tensors of all experts in whose 2 f outputs, in dim 1 once they are transposed back, gates and ups alternate; their
    usual form has [experts, 2, f, ..].
    """

    names: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    transposed: tuple[str, ...] = ()
    interleaved: tuple[str, ...] = ()
    wrapped: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def in_file(self, name: str) -> str:
        """Returns the name of a tensor in a file."""
        for usual, stored in self.names:
            name = name.replace(usual, stored)
        return name

    def usual(self, keys: Iterable[str]) -> dict[str, str]:
        """Returns the name in a file -> the name that most families have."""
        keys = list(keys)
        lacking = "" if any(key.startswith(self.prefix) for key in keys) else self.prefix
        names = {}
        for key in keys:
            name = lacking + key
            for usual, stored in self.names:
                name = name.replace(stored, usual)
            names[key] = name
        return names

    def is_changed(self, name: str) -> bool:
        """Returns whether the tensor that most families have under this name has another form in a file."""
        return self._is_transposed(name) or self._is_interleaved(name) or self._ones(name) is not None

    def usual_view(self, name: str, stored: Tensor) -> Tensor:
        """Returns the usual form of a whole tensor of a file: a view."""
        if self._ones(name) is not None:
            return stored.flatten()
        return self.apart(name, stored.transpose(-1, -2) if self._is_transposed(name) else stored)

    def apart(self, name: str, rows: Tensor) -> Tensor:
        """Returns a view of [experts, 2 f, ..] as [experts, 2, f, ..] where gates and ups alternate."""
        return rows.unflatten(1, (-1, 2)).transpose(1, 2) if self._is_interleaved(name) else rows

    def usual_shape(self, name: str, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the usual form of a whole tensor of a file."""
        return self.usual_box(name, Box((0,) * len(stored), stored)).shape

    def shape_in_file(self, name: str, usual: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape in a file of a tensor whose usual form has this shape."""
        if (ones := self._ones(name)) is not None:
            return (*(1,) * ones[0], *usual, *(1,) * ones[1])
        shape = (usual[0], 2 * usual[2], *usual[3:]) if self._is_interleaved(name) else usual
        return (*shape[:-2], shape[-1], shape[-2]) if self._is_transposed(name) else shape

    def usual_box(self, name: str, box: Box) -> Box:
        """Returns the smallest box of the usual form that holds the elements `box` of the tensor in a file."""
        if (ones := self._ones(name)) is not None:
            return Box(box.offset[ones[0] : ones[0] + 1], box.shape[ones[0] : ones[0] + 1])
        offset, shape = list(box.offset), list(box.shape)
        if self._is_transposed(name):
            offset[-2:], shape[-2:] = offset[:-3:-1], shape[:-3:-1]
        if self._is_interleaved(name):
            first, stop = offset[1] // 2, (offset[1] + shape[1] + 1) // 2
            offset[1:2], shape[1:2] = [0, first], [2, stop - first]
        return Box(tuple(offset), tuple(shape))

    def as_in_file(self, name: str, values: Tensor, box: Box) -> Tensor:
        """Returns the elements `box` of the tensor in a file, given those in `usual_box` of it."""
        if self._ones(name) is not None:
            return values.view(box.shape)
        if self._is_interleaved(name):
            place = len(box.shape) - 1 if self._is_transposed(name) else 1
            values = values.transpose(1, 2).flatten(1, 2).narrow(1, box.offset[place] % 2, box.shape[place])
        return (values.transpose(-1, -2) if self._is_transposed(name) else values).contiguous()

    def _is_transposed(self, name: str) -> bool:
        return bool(self.transposed) and self.in_file(name).endswith(self.transposed)

    def _is_interleaved(self, name: str) -> bool:
        return bool(self.interleaved) and self.in_file(name).endswith(self.interleaved)

    def _ones(self, name: str) -> tuple[int, int] | None:
        name = self.in_file(name) if self.wrapped else name
        return next((ones for end, ones in self.wrapped.items() if name.endswith(end)), None)
