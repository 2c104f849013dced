"""A model with low-rank adapters as one without: W + alpha / r * B A, added in fp32 and rounded once."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron.base.box import Box, intersect
from megatron.core.dist_checkpointing.tensor_file import narrow
from megatron.core.models.source import Source
from megatron.spec.decoder import decoder_spec
from megatron.spec.linear import LinearSpec, Projection
from megatron.spec.lora import adapter_names, is_adapter


class MergedSource:
    """The weights of `source` with its adapters merged: a Source. Streams as `source` does."""

    def __init__(self, source: Source) -> None:
        """`source.model` has adapters."""
        self._source = source
        self.model = dataclasses.replace(source.model, lora_rank=None)
        self.shapes = {name: shape for name, shape in source.shapes.items() if not is_adapter(name)}
        self.dtype, self.carried = source.dtype, source.carried
        spec = decoder_spec(source.model)
        assert spec.lora is not None
        self._lora, self._layers = spec.lora, [layer.linears() for layer in spec.layers]

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """See Source."""
        linear = self._linear(name)
        if linear is None:
            return self._source.read(name, box, dtype)
        whole = self._source.read(name, box, torch.float32)
        outputs = Box(box.offset[:-1], box.shape[:-1])
        for projection in linear.projections:
            common = intersect(projection.outputs, outputs)
            if common is not None and projection.name in self._lora.projections:
                overlap = Box((*common.offset, box.offset[-1]), (*common.shape, box.shape[-1])).within(box)
                narrow(whole, overlap).add_(self._change(name.removesuffix(".weight"), projection, common, box))
        return whole.to(dtype)

    def _change(self, linear: str, projection: Projection, outputs: Box, box: Box) -> Tensor:
        """alpha / rank * B A for these outputs of the projection and the inputs of `box`."""
        rank = self._lora.rank
        a_name, b_name = adapter_names(linear, projection.name)
        rows = outputs.within(projection.outputs)
        a = self._source.read(a_name, Box((0, box.offset[-1]), (rank, box.shape[-1])), torch.float32)
        b = self._source.read(b_name, Box((*rows.offset, 0), (*rows.shape, rank)), torch.float32)
        return (b.flatten(0, -2) @ a).view(*outputs.shape, -1) * self._lora.scale

    def _linear(self, name: str) -> LinearSpec | None:
        """The layer whose weight is called `name` (decoder.layers.NUMBER.PATH.weight), if it has an adapter."""
        parts = name.removesuffix(".weight").split(".", 3)
        if parts[:2] != ["decoder", "layers"]:
            return None
        linear = self._layers[int(parts[2])].get(parts[3])
        return linear if linear is not None and self._lora.adapts(linear) else None
