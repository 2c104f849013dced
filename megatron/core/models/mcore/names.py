"""The tensors of Megatron-LM's classic checkpoints, and the elements of ours that they are.

A rank's file holds its own shards under the names of its own stage: layers are numbered from 0 in each chunk of a stage.
Fused weights have our order, but flattened: QKV is [groups/tp * (q + 2) d, h], gate and up are [2 * f/tp, h].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.base.box import Box
from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.core.models.mapping import Mapping, Part, Table
from megatron.spec.decoder import (
    OUTPUT_LAYER,
    POSITION_EMBEDDINGS,
    WORD_EMBEDDINGS,
    DecoderSpec,
    LayerSpec,
    decoder_spec,
)
from megatron.spec.parameter import ParamSpec

Shape = tuple[int, ...]
# Modules of a layer in the order of Megatron-LM's, and the linear layer that a norm is stored with by Transformer Engine.
ORDER = (
    "input_layernorm",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
ORDER_FUSED = ("self_attention.linear_proj", "input_layernorm", *ORDER[2:])
NORM_OF = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
VOCABULARY = ("word_embeddings.weight", "output_layer.weight")  # names of tensors that are padded, at their end


@dataclass(frozen=True)
class CheckpointLayout:
    """How a checkpoint is cut. layers: their number in each chunk, in the order of the model.

    Chunk c of the model is chunk c // pp of stage c % pp (one chunk a stage without an interleaved schedule).
    fused_norms: a norm before a linear layer is stored with it, as Transformer Engine's layers do. vocabulary: rows of the
    embedding in each tp rank's file, with padding.
    """

    tp: int
    pp: int
    layers: tuple[int, ...]
    fused_norms: bool
    vocabulary: int

    @property
    def chunks(self) -> int:
        """Chunks a stage."""
        return len(self.layers) // self.pp

    def full_shape(self, name: str, shape: Shape) -> Shape:
        """Returns the shape of a tensor in a rank's file; `shape` is that without the padding of the vocabulary."""
        return (self.vocabulary, *shape[1:]) if name.endswith(VOCABULARY) else shape

    def folder(self, tp_rank: int, stage: int) -> str:
        """The rank's folder."""
        return f"mp_rank_{tp_rank:02d}" + (f"_{stage:03d}" if self.pp > 1 else "")

    def key(self, tp_rank: int, chunk: int, name: str) -> str:
        """A tensor's place as one string: folder/model key/name."""
        number = str(chunk // self.pp) if self.chunks > 1 else ""
        return f"{self.folder(tp_rank, chunk % self.pp)}/model{number}/{name}"


def table(model: ModelConfig, layout: CheckpointLayout, *, copies: bool = False) -> Table:
    """All tensors, in the order of Megatron-LM's modules; of the vocabulary's, the rows that are not padding.

    copies: with the last stage's of a tied embedding, which Megatron-LM loads there as the output layer's.
    """
    spec, last, namer = decoder_spec(model), len(layout.layers) - 1, _Namer(layout)
    homes = [(0, WORD_EMBEDDINGS)]
    if copies and layout.pp > 1 and spec.tied:
        homes.append((last, OUTPUT_LAYER))
    found = [namer.vocabulary(WORD_EMBEDDINGS, homes, spec)]
    if spec.embedding.positions is not None:
        found.append(namer.mapping(0, POSITION_EMBEDDINGS, POSITION_EMBEDDINGS, spec.embedding.positions))
    number = 0
    for chunk, count in enumerate(layout.layers):
        for local in range(count):
            own, theirs = f"decoder.layers.{number}.", f"decoder.layers.{local}."
            found += _layer(namer, chunk, own, theirs, spec.layers[number], fused_norms=layout.fused_norms)
            number += 1
    assert number == len(spec.layers), f"{number} layers in the chunks, {len(spec.layers)} in the model"
    for kind, parameter in spec.final_norm.parameters():
        name = f"decoder.final_layernorm.{kind}"
        found.append(namer.mapping(last, name, name, parameter))
    if not spec.tied:
        found.append(namer.vocabulary(OUTPUT_LAYER, [(last, OUTPUT_LAYER)], spec))
    return Table(found)


class _Namer:
    """Makes the mappings of one layout."""

    def __init__(self, layout: CheckpointLayout) -> None:
        self._layout = layout

    def mapping(self, chunk: int, own: str, theirs: str, parameter: ParamSpec) -> Mapping:
        """Any parameter but the vocabulary's. Theirs has one dim of rows where ours has two."""
        shape = parameter.shape
        if not parameter.shards:
            return self._replicated(chunk, own, theirs, shape)
        ((_, dim),) = parameter.shards
        is_bias = len(shape) == 1 or not own.endswith("weight")
        if len(shape) > (1 if is_bias else 2):
            return self._flattened(chunk, own, theirs, shape, dim)
        return self._sharded(chunk, own, theirs, shape, dim)

    def _replicated(self, chunk: int, own: str, theirs: str, shape: Shape) -> Mapping:
        whole = Box((0,) * len(shape), shape)
        ranks = range(self._layout.tp)
        return Mapping(
            own, shape, tuple(Part(own, whole, self._layout.key(rank, chunk, theirs), whole) for rank in ranks)
        )

    def _sharded(self, chunk: int, own: str, theirs: str, shape: Shape, dim: int) -> Mapping:
        """Cut along `dim`, with the same number of dims on both sides."""
        parts = []
        for rank, piece in enumerate(self._pieces(shape, dim)):
            inside = Box((0,) * len(shape), piece.shape)
            parts.append(Part(own, piece, self._layout.key(rank, chunk, theirs), inside))
        return Mapping(own, shape, tuple(parts))

    def _flattened(self, chunk: int, own: str, theirs: str, shape: Shape, dim: int) -> Mapping:
        """Ours [n, rows, ...] cut along `dim`; theirs [n' * rows', ...]: a rank's first two dims as one."""
        parts = []
        for rank, piece in enumerate(self._pieces(shape, dim)):
            rows, rest = piece.shape[1], piece.shape[2:]
            zeros = tuple(0 for _ in rest)
            for number in range(piece.shape[0]):
                own_box = Box((piece.offset[0] + number, *piece.offset[1:]), (1, rows, *rest))
                their_box = Box((number * rows, *zeros), (rows, *rest))
                parts.append(Part(own, own_box, self._layout.key(rank, chunk, theirs), their_box))
        return Mapping(own, shape, tuple(parts))

    def vocabulary(self, own: str, homes: Sequence[tuple[int, str]], spec: DecoderSpec) -> Mapping:
        """homes: (chunk, their name) of each copy."""
        shape, rows = spec.embedding.words.shape, self._layout.vocabulary
        columns = shape[1]
        parts = []
        for chunk, theirs in homes:
            for rank in range(self._layout.tp):
                first = rank * rows
                used = max(0, min(rows, spec.softmax_size - first))  # 0: a shard of padding, which is in the file, too
                own_box, inside = Box((first, 0), (used, columns)), Box((0, 0), (used, columns))
                parts.append(Part(own, own_box, self._layout.key(rank, chunk, theirs), inside))
        return Mapping(own, shape, tuple(parts))

    def _pieces(self, shape: Shape, dim: int) -> list[Box]:
        length = shape[dim] // self._layout.tp
        return [
            Box(
                tuple(rank * length if d == dim else 0 for d in range(len(shape))),
                tuple(length if d == dim else n for d, n in enumerate(shape)),
            )
            for rank in range(self._layout.tp)
        ]


def padded_rows(model: ModelConfig, tp: int) -> int:
    """Rows of the vocabulary in each tp rank's file, with Megatron-LM's padding. Raises ConfigError."""
    assert model.vocab_size
    if fixed := model.fixed_padded_vocab_size:
        if fixed % tp:
            raise ConfigError(
                f"{tp} tensor-parallel ranks cannot share the {fixed} rows of --padded-vocab-size equally"
            )
        return fixed // tp
    multiple = model.make_vocab_size_divisible_by * tp
    return -(-model.vocab_size // multiple) * model.make_vocab_size_divisible_by


def _layer(
    namer: _Namer, chunk: int, own: str, theirs: str, layer: LayerSpec, *, fused_norms: bool
) -> Iterator[Mapping]:
    """The tensors of a layer, in the order of Megatron-LM's modules."""
    parts = dict(layer.parts())
    for path in ORDER_FUSED if fused_norms else ORDER:
        for kind, parameter in parts[path].parameters() if path in parts else ():
            their_name = f"{path}.{kind}"
            if fused_norms and path in NORM_OF:
                their_name = f"{NORM_OF[path]}.layer_norm_{kind}"
            yield namer.mapping(chunk, f"{own}{path}.{kind}", theirs + their_name, parameter)
