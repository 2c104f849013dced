"""The tensors of Hugging Face decoders, and the elements of ours that they are. See core/models/mapping.py.

Every linear layer of the description names its projections as transformers does, so the table is derived from it: a family
only says how its modules are called, and which projections it stores as one tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from megatron.base.box import Box
from megatron.config.model import ModelConfig
from megatron.core.models.hf.family.family import Family
from megatron.core.models.mapping import Mapping, Part, Table
from megatron.spec.decoder import OUTPUT_LAYER, WORD_EMBEDDINGS, DecoderSpec, LayerSpec, decoder_spec
from megatron.spec.linear import LinearSpec
from megatron.spec.parameter import ParamSpec

# Our module -> theirs, of a layer.
BLOCKS = {"self_attention": "self_attn", "mlp": "mlp"}


def table(family: Family, model: ModelConfig) -> Table:
    """The table of a dense decoder of this family."""
    spec = decoder_spec(model)
    mappings = [_rows(WORD_EMBEDDINGS, "model.embed_tokens.weight", spec)]
    for number, layer in enumerate(spec.layers):
        mappings += _layer(f"decoder.layers.{number}.", f"model.layers.{number}.", family, layer)
    for name, parameter in spec.final_norm.parameters():
        mappings.append(_norm(f"decoder.final_layernorm.{name}", f"model.norm.{name}", parameter))
    if not spec.tied:
        mappings.append(_rows(OUTPUT_LAYER, "lm_head.weight", spec))
    return Table(mappings)


def _layer(own: str, theirs: str, family: Family, layer: LayerSpec) -> Iterator[Mapping]:
    for path, part in layer.parts():
        for name, parameter in part.parameters():
            if isinstance(part, LinearSpec):
                block = theirs + BLOCKS[path.split(".")[0]]
                yield _linear(f"{own}{path}.{name}", f"{block}.{{}}.{name}", part, parameter, family.fused.get(path))
            else:
                yield _norm(f"{own}{path}.{name}", f"{theirs}{family.norms[path]}.{name}", parameter)


def _norm(own: str, theirs: str, parameter: ParamSpec) -> Mapping:
    """Theirs has one dim, in which the heads of ours follow each other."""
    *heads, size = parameter.shape
    parts = [
        Part(own, Box((*at, 0), (*(1 for _ in heads), size)), theirs, Box((number * size,), (size,)))
        for number, at in enumerate(itertools.product(*(range(n) for n in heads)))
    ]
    return Mapping(own, parameter.shape, tuple(parts))


def _rows(own: str, theirs: str, spec: DecoderSpec) -> Mapping:
    """The rows of the vocabulary, without our padding."""
    shape = spec.embedding.words.shape
    rows = Box((0, 0), (spec.vocabulary, shape[1]))
    return Mapping(own, shape, (Part(own, rows, theirs, rows),))


def _linear(own: str, theirs: str, linear: LinearSpec, parameter: ParamSpec, fused: str | None) -> Mapping:
    """The weight or the bias of a linear layer. `theirs` has a place for the name of a projection; `fused` is that of the
    tensor that holds all projections one after the other, if there is one."""
    columns = parameter.shape[len(linear.out_shape) :]
    zeros, first = tuple(0 for _ in columns), 0
    parts = []
    for projection in linear.projections:
        *front, start = projection.outputs.offset
        *repeats, rows = projection.outputs.shape
        # With a dim in front (key/value groups, or gate and up), their rows follow each other along it.
        for index in range(math.prod(repeats)):
            own_box = Box((*(at + index for at in front), start, *zeros), (*(1 for _ in front), rows, *columns))
            their_box = Box((first + index * rows, *zeros), (rows, *columns))
            parts.append(Part(own, own_box, theirs.format(fused or projection.name), their_box))
        first += projection.outputs.numel if fused else 0
    return Mapping(own, parameter.shape, tuple(parts))
