"""A folder of safetensors files in Hugging Face's layout: one model.safetensors, or shards with an index."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.base.read_file import read_json
from megatron.core.dist_checkpointing.tensor_file import Entry, TensorFile, narrow
from megatron.core.models.carried import IN_MEMORY, ON_HUB, decoder_name
from megatron.core.models.hf.stored import StoredTensors

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Rotary frequencies, and masks of attention of GPT-2, GPT-J and CodeGen.
_LEFTOVERS = ("rotary_emb.inv_freq", ".self_attn.bias", ".self_attn.masked_bias", ".self_attn.causal_mask")
_OLD_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class HFFolder:
    """The tensors of a folder by name, read on demand. Opening it reads only the headers.

    `entries` maps each name to its dtype and shape. Of a model that also sees images these are the language model's,
    under the names that it has alone, without `prefix` (see carried.py); `others` are the other tensors.
    """

    def __init__(self, path: Path, *, has_images: bool = False, stored: StoredTensors | None = None) -> None:
        """Raises CheckpointError for a folder, an index or a shard that is missing or damaged, naming it.

        stored: how the files have the tensors, whose names and shapes here are those of most families.
        """
        self.path, self._form = path, stored or StoredTensors()
        index = _read_index(path / INDEX_FILE)
        self._files = {name: TensorFile(path / name) for name in _shards(path, index)}
        self._place = {key: name for name, file in self._files.items() for key in file.entries}
        for key, name in (index or {}).items():
            if self._place.get(key) != name:
                raise CheckpointError(f"{path / name} holds no tensor {key}, which {path / INDEX_FILE} says is there")
        held = {key: entry for file in self._files.values() for key, entry in file.entries.items()}
        usual = self._form.usual(held)
        names = {key: decoder_name(key) if has_images else usual[key] for key in held}
        self._stored = {name: key for key, name in names.items() if name is not None}
        self._changed = {name for name in self._stored if self._form.is_changed(name)}
        self.entries: dict[str, Entry] = {name: self._entry(name, held[key]) for name, key in self._stored.items()}
        self.others = {key: held[key] for key, name in names.items() if name is None}
        if clash := self.others.keys() & self.entries.keys():
            raise CheckpointError(f"{path}: {min(clash)} is the name of two tensors, one of the language model")
        self._stored |= {key: key for key in self.others}
        prefixes = (prefix for prefix in (ON_HUB, IN_MEMORY) if any(key.startswith(prefix) for key in held))
        self.prefix = next(prefixes, "") if has_images else ""

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes."""
        return sum((self.path / name).stat().st_size for name in self._files)

    def fill(self, out: Tensor, names: Sequence[str], box: Box) -> None:
        """Copies elements `box` of these tensors into `out`, one tensor behind the other, rounded to its dtype.

        One file after the other is open, and is read in the order of its bytes. Raises DamagedError.
        """
        if not self._changed.isdisjoint(names):
            for number, name in enumerate(names):
                out.view(len(names), *box.shape)[number].copy_(narrow(self.view(name), box))
            return
        names = [self._stored[name] for name in names]
        files, out = [self._place[name] for name in names], out.view(len(names), *box.shape)
        for file in dict.fromkeys(files):
            numbers = [number for number, place in enumerate(files) if place == file]
            self._files[file].fill(out, numbers, [names[number] for number in numbers], box)

    def require(self, expected: dict[str, tuple[int, ...]]) -> None:
        """Raises CheckpointError unless the folder holds these tensors in these shapes; it may hold others."""
        for name, shape in expected.items():
            entry = self.entries.get(name)
            if entry is None:
                raise CheckpointError(f"{self.path} holds no tensor {name}, which its config.json requires")
            if entry.shape != shape:
                raise CheckpointError(
                    f"{self.path}: tensor {name} is {list(entry.shape)}, its config.json requires {list(shape)}"
                )

    def view(self, name: str) -> Tensor:
        """Returns the whole tensor in mapped memory; do not write to it."""
        stored = self._stored[name]
        tensor = self._files[self._place[stored]].view(stored)
        return self._form.usual_view(name, tensor)

    def check(
        self, expected: dict[str, tuple[int, ...]], *, tied_head: str | None, unread: Collection[str] = ()
    ) -> None:
        """Raises CheckpointError unless the folder holds exactly the `expected` tensors in these shapes.

        It may hold those named in `unread`. Leftovers of older models are allowed: rotary frequencies and masks, which
        follow from config.json, and a `tied_head` that equals the embedding.
        """
        self.require(expected)
        expected_names = {*expected, *unread}
        extra = [name for name in self.entries if name not in expected_names and not name.endswith(_LEFTOVERS)]
        if tied_head in extra:
            self._check_tied(tied_head)
            extra.remove(tied_head)
        if extra:
            raise CheckpointError(
                f"{self.path} holds {len(extra)} tensors that its config.json does not describe, {sorted(extra)[0]} "
                "among them; it is another model than the file says"
            )

    def dtype(self, names: Iterable[str]) -> torch.dtype:
        """The dtype of most elements of these tensors."""
        sizes: dict[torch.dtype, int] = {}
        for entry in (self.entries[name] for name in names):
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + math.prod(entry.shape)
        return max(sizes, key=lambda dtype: sizes[dtype])

    def _entry(self, name: str, entry: Entry) -> Entry:
        return dataclasses.replace(entry, shape=self._form.usual_shape(name, entry.shape))

    def _check_tied(self, head: str) -> None:
        embedding = "model.embed_tokens.weight"
        both = [self.view(name) for name in (head, embedding)]
        if both[0].dtype != both[1].dtype or not torch.equal(*both):
            raise CheckpointError(
                f"{self.path}: config.json ties the head to the embedding, but {head} differs from {embedding}"
            )


def _shards(path: Path, index: dict[str, str] | None) -> list[str]:
    if index is not None:
        names = sorted(set(index.values()))
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{path / missing[0]} is not there, though {path / INDEX_FILE} names it; copy the model again"
            )
        return names
    if (path / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    old = next((name for name in _OLD_FILES if (path / name).exists()), None)
    if old:
        raise CheckpointError(
            f"{path} holds {old}, which could run code when it is read; write its weights as safetensors, with python "
            f"-c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{path}', dtype='auto')"
            ".save_pretrained('NEW')\", and copy its tokenizer"
        )
    raise CheckpointError(f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE}; give a Hugging Face model's folder")


def _read_index(index: Path) -> dict[str, str] | None:
    """Returns the file of each tensor; None if there is no index."""
    if not index.is_file():
        return None
    try:
        places = dict(read_json(index)["weight_map"])
        if not all(isinstance(name, str) and Path(name).name == name for name in set(places.values())):
            raise ValueError("a file name is not one")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read: {type(error).__name__} {error}") from error
    return places
