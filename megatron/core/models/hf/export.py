"""Writes a folder in Hugging Face format as a stream: a JSON file, and shards of safetensors with an index.

NAME/         a complete export
.NAME.tmp/    being written; left by a killed program, removed by `repair` and by the next export
.NAME.old/    replaced by another export; complete until that is in place, and restored by `repair` if it never is
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.core.dist_checkpointing.storage import sync_folder
from megatron.core.dist_checkpointing.tensor_file import write_tensor_file
from megatron.core.dist_checkpointing.whole import WRITERS, WholeTensor, fill_files
from megatron.core.models.carried import CarriedTensors, folder_name
from megatron.core.models.hf.folder import INDEX_FILE
from megatron.core.models.hf.side_files import copy_side_files
from megatron.core.models.hf.stored import StoredTensors
from megatron.core.models.mapping import Table, gather
from megatron.core.models.source import Source, stored_dtype

_LEFT = re.compile(r"\.(iter_\d{7,})\.(?:tmp|old)")  # leftovers of the exports that a run makes of its checkpoints


class HFExport:
    """A folder that is being written: `begin`, `write` for all shards (on any ranks and threads), then `finish`.

    Everything is written to a folder next to `path`, which is renamed at the end: `path` is either complete or absent,
    and an older export is deleted once the new one is complete.
    """

    def __init__(
        self,
        source: Source,
        path: Path,
        dtype: torch.dtype,
        table: Table,
        *,
        config: tuple[str, dict[str, Any]],
        single_file: str,
        replace: bool,
        shard_bytes: int,
        carried: CarriedTensors | None = None,
        stored: StoredTensors | None = None,
        constants: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`table` maps the tensors to write. `config` is the name and content of the JSON file. `single_file` is the
        name of the weights' file if there is only one. `replace` allows `path` to hold an older export. `carried` are
        tensors to write as they are, with the prefix that the names of all others have. `stored`: how the files have
        the tensors of `table`. constants: tensors of one number to write, by name.
        """
        carried, self._form = carried or CarriedTensors(), stored or StoredTensors()
        self.path, self._source, self._dtype, self._table, self._replace = path, source, dtype, table, replace
        self._config, self._single_file = config, single_file
        self._temporary = _temporary(path)
        tensors = [
            WholeTensor(
                folder_name(self._form.in_file(name), carried.prefix),
                stored_dtype(name, dtype),
                self._form.shape_in_file(name, shape),
                self._reader(name, stored_dtype(name, dtype)),
            )
            for name, shape in table.theirs.items()
        ]
        tensors += [WholeTensor(name, t.dtype, t.shape, t.read) for name, t in carried.tensors.items()]
        for name, value in constants.items():
            tensors.append(WholeTensor(name, dtype, (), functools.partial(_constant, torch.tensor(value, dtype=dtype))))
        self.tensors = tensors
        self._shards = fill_files(tensors, shard_bytes)
        self.nbytes = sum(tensor.nbytes for tensor in tensors)

    @property
    def shards(self) -> range:
        """Numbers of the shards."""
        return range(len(self._shards))

    def begin(self) -> None:
        """Creates the folder to write in. Raises CheckpointError if `path` is not empty; OSError."""
        repair(self.path)
        if self.path.exists():
            if not self.path.is_dir():
                raise CheckpointError(f"{self.path} exists and is not a folder; give another one")
            if not self._replace and any(self.path.iterdir()):
                raise CheckpointError(f"{self.path} exists and is not empty; give another folder")
        self._temporary.mkdir(parents=True)

    def write(self, numbers: Sequence[int], on_bytes: Callable[[int], None] = lambda nbytes: None) -> None:
        """Writes and syncs these shards, two at a time. Memory: one block per shard in progress. Raises OSError."""

        def shard(number: int) -> None:
            sources = [tensor.source(tensor.name, on_bytes) for tensor in self._shards[number]]
            # transformers requires this mark, which says that the tensors are torch's.
            write_tensor_file(self._temporary / self._name(number), sources, {"format": "pt"})

        with ThreadPoolExecutor(WRITERS) as pool:
            list(pool.map(shard, numbers))

    def finish(self, files: Mapping[str, Path], texts: Mapping[str, str]) -> None:
        """Completes the export after all shards: the JSON file, copies of `files` and `texts` by name, the index; then
        renames it.
        """
        name, content = self._config
        _write_json(self._temporary / name, content)
        if len(self._shards) > 1:
            places = {tensor.name: self._name(number) for number, held in enumerate(self._shards) for tensor in held}
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(places.items()))}
            _write_json(self._temporary / INDEX_FILE, index)
        copy_side_files(files, texts, self._temporary)
        sync_folder(self._temporary)
        if self.path.exists():
            self.path.rename(_replaced(self.path))
        self._temporary.rename(self.path)
        sync_folder(self.path.parent)
        repair(self.path)

    def abandon(self) -> None:
        """Deletes the written files."""
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _name(self, number: int) -> str:
        count = len(self._shards)
        return self._single_file if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def _reader(self, name: str, dtype: torch.dtype) -> Callable[[Box], Tensor]:
        def read(box: Box) -> Tensor:
            pieces = self._table.of_theirs(name, box)
            return gather(pieces, box, dtype, lambda ours, part: self._source.read(ours, part, dtype))

        def read_changed(box: Box) -> Tensor:
            return self._form.as_in_file(name, read(self._form.usual_box(name, box)), box)

        return read_changed if self._form.is_changed(name) else read


def _constant(value: Tensor, box: Box) -> Tensor:
    return value


def repair(path: Path) -> None:
    """Repairs an export at `path` after a killed program: afterwards it is complete, older or newer, or absent.

    Raises OSError. Do not call it while another process writes that export.
    """
    replaced, temporary = _replaced(path), _temporary(path)
    if replaced.exists():
        if not path.exists():  # killed between the two renames
            replaced.rename(path)
        else:
            shutil.rmtree(replaced)
    if temporary.exists():
        shutil.rmtree(temporary)


def leftovers(root: Path) -> list[Path]:
    """Returns the paths of exports under `root` of which a killed program left files."""
    matches = (_LEFT.fullmatch(entry.name) for entry in root.iterdir()) if root.is_dir() else ()
    return sorted({root / match[1] for match in matches if match})


def _temporary(path: Path) -> Path:
    return path.parent / f".{path.name}.tmp"


def _replaced(path: Path) -> Path:
    return path.parent / f".{path.name}.old"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with open(path, "x", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
