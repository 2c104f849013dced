"""Reads Megatron-LM's classic checkpoints. Pickles are read by torch's restricted unpickler: no code of theirs is run.

Objects of classes that are not known here (enums among the arguments, the state of its tokenizer) become inert stand-ins:
nothing is imported for them. Tensors are mapped, and read when they are asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megatron.core.dist_checkpointing.boxes import Box
from megatron.core.dist_checkpointing.tensor_file import narrow
from megatron.core.errors import CheckpointError
from megatron.core.models.mapping import gather
from megatron.core.models.mcore.arguments import model_of
from megatron.core.models.mcore.names import VOCABULARY, Layout, table

FILE = "model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class MCoreSource:
    """A Source. `layout`: how it was cut."""

    def __init__(self, root: Path, step: int | None, vocab_size: int | None, ignored: Sequence[str] = ()) -> None:
        """`root`: the folder with the tracker, or one iteration's. `vocab_size` and `ignored`: see arguments.py. Raises
        CheckpointError, and ConfigError for a name that cannot be ignored."""
        self.path = _iteration_folder(root, step)
        ranks = _ranks(self.path)
        tp, pp = (1 + max(rank[axis] for rank in ranks) for axis in (0, 1))
        if set(ranks) != {(t, p) for t in range(tp) for p in range(pp)}:
            raise CheckpointError(
                f"{self.path} holds {len(ranks)} folders mp_rank_..., tp {tp} x pp {pp} need {tp * pp}"
            )
        self._files = {folder.name: _load(folder / FILE) for folder in ranks.values()}
        first = self._files[ranks[0, 0].name]
        self.arguments = vars(first["args"]) if isinstance(first.get("args"), argparse.Namespace) else {}
        if not self.arguments:
            raise CheckpointError(
                f"{ranks[0, 0] / FILE} holds no arguments; it is no checkpoint of Megatron-LM's training"
            )
        self.model = model_of(self.arguments, str(self.path), vocab_size, ignored)
        chunks = max(1, sum(bool(re.fullmatch(r"model\d+", key)) for key in first))
        names = [
            list(self._files[ranks[0, stage].name].get(f"model{chunk}" if chunks > 1 else "model", ()))
            for chunk in range(chunks)
            for stage in range(pp)
        ]
        layers = tuple(len({match[1] for name in held if (match := _LAYER.match(name))}) for held in names)
        fused = any(name.endswith("linear_qkv.layer_norm_weight") for held in names for name in held)
        # How rows were padded is not always among the arguments.
        embedding = f"{ranks[0, 0].name}/{'model0' if chunks > 1 else 'model'}/embedding.word_embeddings.weight"
        rows = self._tensor(embedding).shape[:1]
        self.layout = Layout(tp, pp, layers, fused, rows[0] if rows else 0)
        assert self.model.vocab_size
        if self.model.vocab_size > tp * self.layout.vocabulary:
            raise CheckpointError(
                f"{self.path} holds {tp * self.layout.vocabulary} rows of the vocabulary, fewer than its "
                f"{self.model.vocab_size} ids"
            )
        self.model = dataclasses.replace(self.model, fixed_padded_vocab_size=tp * self.layout.vocabulary)
        if sum(layers) != self.model.num_layers:
            raise CheckpointError(f"{self.path} holds {sum(layers)} layers, its arguments say {self.model.num_layers}")
        self.table = table(self.model, self.layout)
        self._check()
        self.shapes = self.table.own
        self.dtype = self._tensor(next(iter(self.table.theirs))).dtype

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """See core/models/source.py. Rows of the vocabulary's padding are zero."""
        return gather(self.table.of_own(name, box), box, dtype, lambda key, part: narrow(self._tensor(key), part))

    def _tensor(self, key: str) -> Tensor:
        folder, part, name = key.split("/", 2)
        found = self._files[folder].get(part, {}).get(name)
        if not isinstance(found, Tensor):
            raise CheckpointError(f"{self.path}/{folder}: {part} holds no tensor {name}, which its arguments call for")
        return found

    def _check(self) -> None:
        """Every tensor is there in the right shape, and there is no other one."""
        for key, shape in self.table.theirs.items():
            found = tuple(self._tensor(key).shape)
            if found != ((self.layout.vocabulary, *shape[1:]) if key.endswith(VOCABULARY) else shape):
                raise CheckpointError(f"{self.path}: {key} is {list(found)}, its arguments call for {list(shape)}")
        known = set(self.table.theirs)
        for folder, content in self._files.items():
            for part in (key for key in content if re.fullmatch(r"model\d*", key)):
                for name, value in content[part].items():
                    key = f"{folder}/{part}/{name}"
                    if isinstance(value, Tensor) and key not in known and not _is_spare(name):
                        raise CheckpointError(
                            f"{self.path}: unknown tensor {key}; the model has a part that is not known"
                        )


def _is_spare(name: str) -> bool:
    """State of Transformer Engine, and the copy of a tied embedding that the last stage keeps."""
    return name.endswith("_extra_state") or name == "output_layer.weight" or "rotary_pos_emb" in name


def _iteration_folder(root: Path, step: int | None) -> Path:
    if any(root.glob("mp_rank_*")):
        return root
    tracker = root / TRACKER
    if step is None:
        try:
            text = tracker.read_text(encoding="ascii", errors="replace").strip()
        except OSError as error:
            raise CheckpointError(f"{tracker} cannot be read ({error.strerror}); give a checkpoint's folder") from error
        folder = root / ("release" if text == "release" else f"iter_{int(text):07d}" if text.isdecimal() else text)
    else:
        folder = root / f"iter_{step:07d}"
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not there")
    return folder


def _ranks(folder: Path) -> dict[tuple[int, int], Path]:
    found = {}
    for path in folder.glob("mp_rank_*"):
        match = _RANK.fullmatch(path.name)
        if match and match[3]:
            raise CheckpointError(f"{path} belongs to expert parallelism, which is not supported")
        if match:
            found[int(match[1]), int(match[2] or 0)] = path
    if not found:
        raise CheckpointError(
            f"{folder} holds no mp_rank_... folder: it is not in Megatron-LM's classic layout (--ckpt-format torch)"
        )
    return found


def _load(path: Path) -> dict[str, Any]:
    try:
        with safe_globals([argparse.Namespace]):
            unknown = get_unsafe_globals_in_checkpoint(str(path))
        with safe_globals([argparse.Namespace, *((_stand_in(name), name) for name in unknown)]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a damaged or hostile file makes torch raise
        reason = " ".join(str(error).splitlines())[:200]
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {reason}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no checkpoint of Megatron-LM")
    return content


def _stand_in(name: str) -> type:
    """A class that takes any arguments and any state, and does nothing with them."""

    class StandIn:
        def __new__(cls, *args: Any, **kwargs: Any) -> StandIn:
            return object.__new__(cls)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def __setstate__(self, state: Any) -> None:
            pass

        def __repr__(self) -> str:
            return f"<{name}>"

    return StandIn
