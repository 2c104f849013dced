"""Reads pickles of other programs as data: nothing that a pickle names is imported or called.

[Note: pickles as data]
A pickle is a program: it names functions and calls them. Here each name that it may use is looked up in a table.
Unknown classes (enums among the arguments of a run, states of its tokenizer) become stand-ins that take any arguments
and any state and do nothing. Names of Python's own library are the tools of an attack (os.system, builtins.eval), and
no normal checkpoint has any except those in `_PLAIN`: a file with another one is rejected.

Python 3.11.0 to 3.11.3 pickle a member of an enum as getattr(class, name), or as its name in the module, and other
versions as class(value). For that call, and for no other use of getattr,
the class is asked for the member as class(name).
"""

from __future__ import annotations

import argparse
import pickle
import re
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megatron.base.errors import CheckpointError

_PLAIN = re.compile(
    r"signal\.(Signals|Handlers|SIG\w+)|pathlib\.(\w+\.)?\w*Path|types\.SimpleNamespace|datetime\.\w+|enum\.\w+"
)
_STORAGE = re.compile(r"/data/\d+$")
_BLOCK = 2**24
_GETATTR = "builtins.getattr"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def load_objects(file: Path | BinaryIO, where: str, *, mapped: bool = False) -> Any:
    """Returns the object that `torch.save` wrote to a file, on the CPU, read by torch's restricted unpickler. See the
    note.

    `mapped` leaves tensors on disk until they are read; `file` is then a path, and `Checksums` checks what is read.
    Raises CheckpointError naming `where` for a file that is missing, damaged, or uses names that no checkpoint needs.
    """
    try:
        check_zip(file, without_storages=mapped)
        if not isinstance(file, Path):
            file.seek(0)
        with safe_globals([argparse.Namespace, (_member, _GETATTR)]):
            unknown = get_unsafe_globals_in_checkpoint(file)
        if hostile := sorted(name for name in unknown if _runs_something(name)):
            raise CheckpointError(f"{where} is refused: its pickle would call {', '.join(hostile)}")
        if not isinstance(file, Path):
            file.seek(0)
        stand_ins = ((type(name, (_StandIn,), {}), name) for name in unknown)
        with safe_globals([argparse.Namespace, (_member, _GETATTR), *stand_ins]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file can make torch raise anything
        raise unreadable(where, error) from error


def check_zip(file: Path | BinaryIO, *, without_storages: bool = False) -> None:
    """Compares the records of a file that `torch.save` wrote with their checksums, which torch.load does not.

    Says nothing about a file without any: one in torch's old format, or one saved with compute_crc32=False. Raises
    zipfile.BadZipFile, and OSError.
    """
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as records:
        for record in _with_checksum(records):
            if without_storages and _STORAGE.search(record.filename):
                continue
            with records.open(record) as content:
                while content.read(_BLOCK):  # at its end zipfile compares the checksum
                    pass


class Checksums:
    """The checksums of storages in mapped files, which are compared when a storage is read for the first time."""

    def __init__(self) -> None:
        self._checksums: dict[
            str, set[tuple[int, int]]
        ] = {}  # file -> (bytes, CRC-32) of its storages; none: no checksums
        self._checked: set[int] = set()

    def add(self, file: Path) -> None:
        """Reads the checksums of a file that `load_objects` has mapped. Raises OSError."""
        with zipfile.ZipFile(file) as records:
            self._checksums[str(file)] = {(record.file_size, record.CRC) for record in _with_checksum(records)}

    def check(self, file: Path, tensor: Tensor) -> None:
        """Raises CheckpointError unless the storage of a tensor from `file` has the checksum of one that was saved."""
        storage, checksums = tensor.untyped_storage(), self._checksums[str(file)]
        if not checksums or not storage.nbytes() or storage.data_ptr() in self._checked:
            return
        content = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data
        if (storage.nbytes(), zlib.crc32(content)) not in checksums:
            raise CheckpointError(
                f"{file} is damaged: {storage.nbytes()} bytes of it, a tensor {list(tensor.shape)}, do not have the "
                "checksum of any tensor that was saved in it"
            )
        self._checked.add(storage.data_ptr())


def _with_checksum(records: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """All records with content; none if all have the checksum 0, as torch leaves it if it computes none."""
    files = [record for record in records.infolist() if record.file_size]
    return files if any(record.CRC for record in files) else []


def unreadable(where: str, error: Exception) -> CheckpointError:
    """Returns the error for a file whose reader raised `error`, on one line."""
    reason = " ".join(str(error).splitlines())[:200]
    return CheckpointError(f"{where} cannot be read: {type(error).__name__}: {reason}")


class Record:
    """An object of a known class, as data: its class, its constructor arguments, and its state."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        """Returns a field of an object whose state is its __dict__. Raises KeyError."""
        return self.state[name]


class RecordUnpickler(pickle.Unpickler):
    """Reads a pickle of classes from `packages`; each object becomes a `Record` subclass.

    Each unpickler makes its own subclasses, so changes that a pickle makes to them do not persist. Shapes become
    tuples, dtypes torch dtypes. Raises pickle.UnpicklingError for any other name, and TypeError for any other getattr.
    """

    def __init__(self, file: BinaryIO, packages: tuple[str, ...]) -> None:
        super().__init__(file)
        self._packages = packages
        self._kinds: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Resolves a name of the pickle; see the class."""
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if f"{module}.{name}" == _GETATTR:
            return _member
        if not (module in self._packages or (module, name) == ("torch.serialization", "_get_layout")):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of a checkpoint's metadata")
        return self._kinds.setdefault(f"{module}.{name}", type(name, (Record,), {}))


def _member(kind: Any, name: Any) -> Any:
    """The member of an enum that a pickle names by getattr(kind, name), of a class that is data; see the note."""
    if not (isinstance(kind, type) and issubclass(kind, Record | _StandIn) and isinstance(name, str)):
        raise TypeError(f"it calls {_GETATTR}, which is not part of a checkpoint")
    return kind(name)


def _runs_something(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names and not _PLAIN.fullmatch(name)


class _StandIn:
    """A class that takes any arguments and any state, and ignores them.
    Subclasses have the names of those in the pickle."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _StandIn:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"
