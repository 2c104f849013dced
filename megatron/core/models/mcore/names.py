"""The tensors of Megatron-LM's classic checkpoints, and the elements of ours that they are.

A rank's file holds its own shards under the names of its own stage: layers are numbered from 0 in each chunk of a stage.
Fused weights have our order, but flattened: QKV is [groups/tp * (q + 2) d, h], gate and up are [2 * f/tp, h].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.base.box import Box
from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.core.models.mapping import Mapping, Part, Table

Shape = tuple[int, ...]
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
VOCABULARY = ("word_embeddings.weight", "output_layer.weight")  # names of tensors that are padded, at their end


@dataclass(frozen=True)
class Layout:
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
        """Of a tensor in a rank's file, whose shape without the padding of the vocabulary is `shape`."""
        return (self.vocabulary, *shape[1:]) if name.endswith(VOCABULARY) else shape

    def folder(self, tp_rank: int, stage: int) -> str:
        """The rank's folder."""
        return f"mp_rank_{tp_rank:02d}" + (f"_{stage:03d}" if self.pp > 1 else "")

    def key(self, tp_rank: int, chunk: int, name: str) -> str:
        """A tensor's place as one string: folder/model key/name."""
        number = str(chunk // self.pp) if self.chunks > 1 else ""
        return f"{self.folder(tp_rank, chunk % self.pp)}/model{number}/{name}"


def table(model: ModelConfig, layout: Layout, *, copies: bool = False) -> Table:
    """All tensors, in the order of Megatron-LM's modules; of the vocabulary's, the rows that are not padding.

    copies: with the last stage's of a tied embedding, which Megatron-LM loads there as the output layer's.
    """
    assert model.hidden_size and model.vocab_size and model.num_layers
    h, last = model.hidden_size, len(layout.layers) - 1
    namer = _Namer(layout)
    homes = [(0, EMBEDDING)]
    if copies and layout.pp > 1 and not model.untie_embeddings_and_output_weights:
        homes.append((last, HEAD))
    found = [namer.vocabulary(EMBEDDING, homes, model)]
    if model.position_embedding_type == "learned_absolute":
        assert model.max_position_embeddings
        name = "embedding.position_embeddings.weight"
        found.append(namer.replicated(0, name, name, (model.max_position_embeddings, h)))
    number = 0
    for chunk, count in enumerate(layout.layers):
        for local in range(count):
            found += _layer(namer, chunk, f"decoder.layers.{number}.", f"decoder.layers.{local}.", model, layout)
            number += 1
    assert number == model.num_layers, f"{number} layers in the chunks, {model.num_layers} in the model"
    found += [
        namer.replicated(last, f"decoder.final_layernorm.{kind}", f"decoder.final_layernorm.{kind}", (h,))
        for kind in _norm_kinds(model)
    ]
    if model.untie_embeddings_and_output_weights:
        found.append(namer.vocabulary(HEAD, [(last, HEAD)], model))
    return Table(found)


class _Namer:
    """Makes the mappings of one layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def replicated(self, chunk: int, own: str, theirs: str, shape: Shape) -> Mapping:
        whole = Box((0,) * len(shape), shape)
        ranks = range(self._layout.tp)
        return Mapping(
            own, shape, tuple(Part(own, whole, self._layout.key(rank, chunk, theirs), whole) for rank in ranks)
        )

    def sharded(self, chunk: int, own: str, theirs: str, shape: Shape, dim: int) -> Mapping:
        """Cut along `dim`, with the same number of dims on both sides."""
        parts = []
        for rank, piece in enumerate(self._pieces(shape, dim)):
            inside = Box((0,) * len(shape), piece.shape)
            parts.append(Part(own, piece, self._layout.key(rank, chunk, theirs), inside))
        return Mapping(own, shape, tuple(parts))

    def flattened(self, chunk: int, own: str, theirs: str, shape: Shape, dim: int) -> Mapping:
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

    def vocabulary(self, own: str, homes: Sequence[tuple[int, str]], model: ModelConfig) -> Mapping:
        """homes: (chunk, their name) of each copy."""
        assert model.hidden_size and model.vocab_size
        columns, rows = model.hidden_size, self._layout.vocabulary
        parts = []
        for chunk, theirs in homes:
            for rank in range(self._layout.tp):
                first = rank * rows
                used = max(0, min(rows, model.softmax_size - first))  # 0: a shard of padding, which is in the file, too
                own_box, inside = Box((first, 0), (used, columns)), Box((0, 0), (used, columns))
                parts.append(Part(own, own_box, self._layout.key(rank, chunk, theirs), inside))
        return Mapping(own, (model.padded_vocab_size, columns), tuple(parts))

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


def _norm_kinds(model: ModelConfig) -> tuple[str, ...]:
    return ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",)


def _layer(namer: _Namer, chunk: int, own: str, theirs: str, model: ModelConfig, layout: Layout) -> list[Mapping]:
    assert model.hidden_size and model.num_attention_heads
    h, d, f, groups = model.hidden_size, model.head_dim, model.ffn_dim, model.num_kv_heads
    group_rows = (model.num_attention_heads // groups + 2) * d
    qkv, proj = "self_attention.linear_qkv.", "self_attention.linear_proj."
    fc1, fc2 = "mlp.linear_fc1.", "mlp.linear_fc2."

    def replicated(name: str, shape: Shape, their_name: str | None = None) -> Mapping:
        return namer.replicated(chunk, own + name, theirs + (their_name or name), shape)

    def gate_up(kind: str, columns: Shape) -> Mapping:
        name = fc1 + kind
        if model.swiglu:
            return namer.flattened(chunk, own + name, theirs + name, (2, f, *columns), 1)
        return namer.sharded(chunk, own + name, theirs + name, (f, *columns), 0)

    def norm(name: str, linear: str) -> list[Mapping]:
        theirs = f"{linear}layer_norm_" if layout.fused_norms else f"{name}."
        return [replicated(f"{name}.{kind}", (h,), theirs + kind) for kind in _norm_kinds(model)]

    def biases(*found: Mapping) -> list[Mapping]:
        return list(found) if model.add_bias_linear else []

    weight, width = f"{qkv}weight", model.num_attention_heads * d
    attention = [namer.sharded(chunk, f"{own}{proj}weight", f"{theirs}{proj}weight", (h, width), 1)]
    attention += biases(replicated(f"{proj}bias", (h,)))
    attention += norm("input_layernorm", qkv) if layout.fused_norms else []
    attention.append(namer.flattened(chunk, own + weight, theirs + weight, (groups, group_rows, h), 0))
    if model.qkv_bias:
        bias = f"{qkv}bias"
        attention.append(namer.flattened(chunk, own + bias, theirs + bias, (groups, group_rows), 0))
    if model.qk_layernorm:
        attention += [
            replicated(f"self_attention.{x}_layernorm.{kind}", (d,)) for x in ("q", "k") for kind in _norm_kinds(model)
        ]
    mlp = [*norm("pre_mlp_layernorm", fc1), gate_up("weight", (h,)), *biases(gate_up("bias", ()))]
    mlp += [namer.sharded(chunk, f"{own}{fc2}weight", f"{theirs}{fc2}weight", (h, f), 1)]
    mlp += biases(replicated(f"{fc2}bias", (h,)))
    return [*([] if layout.fused_norms else norm("input_layernorm", qkv)), *attention, *mlp]
