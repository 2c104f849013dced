"""Experts in MXFP4, as gpt-oss is published: 4-bit numbers, 32 of which share a scale that is a power of two (OCP
Microscaling Formats, version 1.0).

A weight X [.., rows, columns] is X_blocks [.., rows, columns / 32, 16] and X_scales [.., rows, columns / 32], both
uint8. A byte of blocks holds two numbers, the first in its low half: a sign and the magnitude in `_MAGNITUDES`. A scale
s stands for 2^(s - 127). All products of both are exact in bf16. Models are written without MXFP4.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.core.models.hf.folder import HFFolder
from megatron.core.models.hf.stored import StoredTensors

_BLOCK = 32  # numbers that share a scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NAN = 127, 255  # of scales
_ROWS = 512  # that are computed at a time
_BLOCKS, _SCALES = "_blocks", "_scales"


class PackedWeights:
    """The weights of a folder, of which those in MXFP4 are computed when they are read. See ScaledWeights."""

    def __init__(self, folder: HFFolder, weights: Mapping[str, tuple[int, ...]], form: StoredTensors) -> None:
        """`weights` are the tensors that the model consists of, with the shapes of their usual forms; the folder may
        lack some. Raises CheckpointError for a weight whose rows are not whole blocks."""
        self._folder, self._form = folder, form
        self._values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
        self.scales: dict[str, str] = {}
        self.scale_shapes: dict[str, tuple[int, ...]] = {}
        self.unread = set[str]()
        for name, shape in weights.items():
            if name in folder.entries or name + _BLOCKS not in folder.entries:
                continue
            *_, rows, columns = shape
            if columns % _BLOCK:
                raise CheckpointError(f"{folder.path}: {name} {list(shape)} is in MXFP4, whose rows are {_BLOCK} long")
            whole = (shape[0], rows if len(shape) < 4 else shape[1] * rows, columns // _BLOCK)
            self.scales[name] = name + _SCALES
            self.scale_shapes |= {name + _BLOCKS: (*whole, _BLOCK // 2), name + _SCALES: whole}

    def fill(self, out: Tensor, names: Sequence[str], box: Box) -> None:
        """Copies elements `box` of these weights into `out`, one behind the other, rounded once to its dtype.

        Raises CheckpointError for a scale that is not a number; otherwise as HFFolder.fill.
        """
        if self.scales.keys().isdisjoint(names):
            return self._folder.fill(out, names, box)
        for part, name in zip(out.view(len(names), *box.shape), names, strict=True):
            if name in self.scales:
                self._fill_packed(part, name, box)
            else:
                self._folder.fill(part, [name], box)

    def _fill_packed(self, out: Tensor, name: str, box: Box) -> None:
        packed, scales = (self._form.apart(name, self._folder.view(name + end)) for end in (_BLOCKS, _SCALES))
        first, stop = box.offset[-1] // _BLOCK, -(-box.end(-1) // _BLOCK)
        columns = slice(box.offset[-1] - first * _BLOCK, box.end(-1) - first * _BLOCK)
        for place in itertools.product(*(range(size) for size in box.shape[:-2])):
            index = tuple(start + number for start, number in zip(box.offset, place))
            for start in range(0, box.shape[-2], _ROWS):
                strip = slice(start, min(start + _ROWS, box.shape[-2]))
                rows = slice(box.offset[-2] + strip.start, box.offset[-2] + strip.stop)
                powers = scales[index][rows, first:stop].int()
                if bool((powers == _NAN).any()):
                    raise CheckpointError(
                        f"{self._folder.path}: tensor {self.scales[name]} has scales that are no numbers; the folder "
                        "is damaged, copy the model again"
                    )
                pairs = packed[index][rows, first:stop].int()
                numbers = self._values[torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(2)]
                numbers = torch.ldexp(numbers, (powers - _BIAS).unsqueeze(-1)).flatten(1)
                out[place][strip] = numbers[:, columns]
