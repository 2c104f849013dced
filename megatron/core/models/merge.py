"""A model with low-rank adapters as one without: W + alpha / r * B A, added in fp32 and rounded once."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron.base.box import Box, intersect
from megatron.core.dist_checkpointing.tensor_file import narrow
from megatron.core.models.source import Source
from megatron.core.transformer.lora import Adapted, Piece, adapted_linears, adapter_names, is_adapter


class MergedSource:
    """The weights of `source` with its adapters merged: a Source. Streams as `source` does."""

    def __init__(self, source: Source) -> None:
        """`source.model` has adapters."""
        self._source = source
        self.model = dataclasses.replace(source.model, lora_rank=None)
        self.shapes = {name: shape for name, shape in source.shapes.items() if not is_adapter(name)}
        self.dtype = source.dtype
        self._adapted = {f"{linear.name}.weight": linear for linear in adapted_linears(source.model)}

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """See Source."""
        adapted = self._adapted_by(name)
        if adapted is None:
            return self._source.read(name, box, dtype)
        whole = self._source.read(name, box, torch.float32)
        outputs = Box(box.offset[:-1], box.shape[:-1])
        for piece in adapted.pieces:
            common = intersect(piece.outputs, outputs)
            if common is not None and piece.projection in self._source.model.lora_projections:
                here = Box((*common.offset, box.offset[-1]), (*common.shape, box.shape[-1])).within(box)
                narrow(whole, here).add_(self._change(name.removesuffix(".weight"), piece, common, box))
        return whole.to(dtype)

    def _change(self, linear: str, piece: Piece, outputs: Box, box: Box) -> Tensor:
        """alpha / r * B A for these outputs of the piece and the inputs of `box`."""
        model = self._source.model
        rank = model.lora_rank
        assert rank
        a_name, b_name = adapter_names(linear, piece.projection)
        rows = outputs.within(piece.outputs)
        a = self._source.read(a_name, Box((0, box.offset[-1]), (rank, box.shape[-1])), torch.float32)
        b = self._source.read(b_name, Box((*rows.offset, 0), (*rows.shape, rank)), torch.float32)
        return (b.flatten(0, -2) @ a).view(*outputs.shape, -1) * (model.lora_alpha / rank)

    def _adapted_by(self, name: str) -> Adapted | None:
        """decoder.layers.NUMBER.NAME.weight -> what is known of NAME."""
        parts = name.split(".", 3)
        return self._adapted.get(parts[3]) if parts[:2] == ["decoder", "layers"] else None
