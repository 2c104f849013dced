"""How the tensors of GPT-2's kind are in files: under names of their own, and some weights transposed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class StoredTensors:
    """names: (a part of the names that most families have, what a file has in its place), in the order in which they
    are replaced. prefix: what the names in a file begin with, which all may lack. transposed: ends of their names, as
    in files, of weights that are stored as [in, out].
    """

    names: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    transposed: tuple[str, ...] = ()

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

    def is_transposed(self, name: str) -> bool:
        """Returns whether the tensor that most families have under this name is transposed in a file."""
        return bool(self.transposed) and self.in_file(name).endswith(self.transposed)
