"""The tensors of Megatron-LM's classic checkpoints, and the elements of ours that they are.

A rank's file holds its own shards under the names of its own stage: layers are numbered from 0 in each chunk of a
stage, experts in each rank of ep. Fused weights have our order, but flattened: QKV is [groups/tp * (q + 2) d, h], gate
and up are [2 * f/tp, h].

[Note: files of experts] A file is named by the ranks of tp, of the stage and, with ep > 1, of ep; its experts are those
of the rank's etp shard. Rank r of a stage has tp rank r % tp, etp rank r % etp and ep rank r // etp % ep. So a pair of
tp and ep may not occur, and where etp divides tp, a file's etp rank is t % etp. With more ranks of etp than of tp
several would write the same file.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.base.box import Box
from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.core.models.mapping import Mapping, Part, Table
from megatron.core.models.mcore.delta_names import (
    CONVOLUTION,
    DECAY,
    DECAYS,
    IN_PROJ,
    RowRange,
    delta_parts,
    gated_rows,
)
from megatron.spec.decoder import (
    OUTPUT_LAYER,
    POSITION_EMBEDDINGS,
    WORD_EMBEDDINGS,
    DecoderSpec,
    LayerSpec,
    PartSpec,
    PredictionSpec,
    decoder_spec,
)
from megatron.spec.delta_net import DeltaNetSpec
from megatron.spec.moe import EXPERT_BIAS, ExpertsSpec, RouterSpec
from megatron.spec.parameter import ParamSpec

Shape = tuple[int, ...]
# Modules of a layer in the order of Megatron-LM's.
ORDER = (
    "input_layernorm",
    "self_attention.core_attention",
    DECAY,
    IN_PROJ,
    CONVOLUTION,
    "self_attention.out_norm",
    "self_attention.out_proj",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.kv_layernorm",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "mlp.router",
    "mlp.experts",
    "mlp.shared_experts",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
)
# The linear layer that a norm is stored with by Transformer Engine, where the layer has it: with latent attention the
# norm of the hidden states is a module of its own, as is that before experts.
NORM_OF = {
    "input_layernorm": "self_attention.linear_qkv",
    "self_attention.q_layernorm": "self_attention.linear_q_up_proj",
    "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
    "pre_mlp_layernorm": "mlp.linear_fc1",
}
FUSED_NORM = ".layer_norm_weight"  # the end of the name of a norm that is stored with a linear layer
# The decoder layer of a prediction of a further token: in torch_dist, and in classic files until core 0.16 and since.
PREDICTION_LAYER, CLASSIC_PREDICTION_LAYER = "transformer_layer", "mtp_model_layer"
# Names of an expert's tensor in the module of the experts: of one MLP after the other, of Transformer Engine's grouped
# layers, and of all experts as one tensor, which torch_dist makes of both.
SEQUENTIAL, GROUPED, GLOBAL = "local_experts.{number}.{name}", "{name}{number}", "experts.{name}"
VOCABULARY = ("word_embeddings.weight", "output_layer.weight")  # names of tensors that are padded, at their end


@dataclass(frozen=True)
class CheckpointLayout:
    """How a checkpoint is cut. layers: their number in each chunk, in the order of the model.

    Chunk c of the model is chunk c // pp of stage c % pp (one chunk a stage without an interleaved schedule).
    fused_norms: a norm before a linear layer is stored with it, as Transformer Engine's layers do. vocabulary: rows of
    the embedding in each tp rank's file, with padding. ep, etp: ranks that share the experts, see [Note: files of
    experts]; experts: the names of their weights, SEQUENTIAL, GROUPED or GLOBAL. fused_expert_norms: the norm before
    experts has the name that it has before a linear layer, as in torch_dist of Megatron-LM's own layers.
    cuts_latents: the projections down to latents are cut by tp, as in its own layers and until core 0.13 in Transformer
    Engine's. splits_delta_nets: each part of the projection of a delta net, and of its convolution, is a tensor, as in
    torch_dist. prediction_layer: the name of the decoder layer of a prediction of a further token.
    """

    tp: int
    pp: int
    layers: tuple[int, ...]
    fused_norms: bool
    vocabulary: int
    ep: int = 1
    etp: int = 1
    experts: str = GLOBAL
    fused_expert_norms: bool = False
    cuts_latents: bool = False
    splits_delta_nets: bool = False
    prediction_layer: str = PREDICTION_LAYER

    @property
    def chunks(self) -> int:
        """Chunks a stage."""
        return len(self.layers) // self.pp

    def full_shape(self, name: str, shape: Shape) -> Shape:
        """Returns the shape of a tensor in a rank's file; `shape` is that without the padding of the vocabulary."""
        return (self.vocabulary, *shape[1:]) if name.endswith(VOCABULARY) else shape

    @functools.cached_property
    def ranks(self) -> list[tuple[int, int]]:
        """(tp rank, ep rank) of the files of each stage."""
        numbers = range(math.lcm(self.tp, self.etp * self.ep))
        return sorted({(number % self.tp, number // self.etp % self.ep) for number in numbers})

    def ranks_of(self, etp_rank: int, ep_rank: int) -> list[tuple[int, int]]:
        """Returns the ranks that hold this shard of the experts."""
        return [(t, e) for t, e in self.ranks if e == ep_rank and t % self.etp == etp_rank]

    def folder(self, tp_rank: int, ep_rank: int, stage: int) -> str:
        """The rank's folder."""
        with_stage = f"mp_rank_{tp_rank:02d}" + (f"_{stage:03d}" if self.pp > 1 else "")
        return with_stage + (f"_{ep_rank:03d}" if self.ep > 1 else "")

    def key(self, tp_rank: int, ep_rank: int, chunk: int, name: str) -> str:
        """A tensor's place as one string: folder/model key/name."""
        number = str(chunk // self.pp) if self.chunks > 1 else ""
        return f"{self.folder(tp_rank, ep_rank, chunk % self.pp)}/model{number}/{name}"


def table(model: ModelConfig, layout: CheckpointLayout, *, copies: bool = False) -> Table:
    """All tensors, in the order of Megatron-LM's modules; of the vocabulary's, the rows that are not padding.

    copies: whether to include the last stage's copy of a tied embedding, which Megatron-LM loads as the output layer.
    That stage's copy for predictions of further tokens is always among them.
    """
    spec, last, namer = decoder_spec(model), len(layout.layers) - 1, _Namer(layout)
    homes = [(0, WORD_EMBEDDINGS)]
    if layout.pp > 1 and spec.predictions:
        homes.append((last, WORD_EMBEDDINGS))
    if copies and layout.pp > 1 and spec.tied:
        homes.append((last, OUTPUT_LAYER))
    mappings = [namer.vocabulary(WORD_EMBEDDINGS, homes, spec)]
    if spec.embedding.positions is not None:
        mappings.append(namer.mapping(0, POSITION_EMBEDDINGS, POSITION_EMBEDDINGS, spec.embedding.positions))
    number = 0
    for chunk, count in enumerate(layout.layers):
        for local in range(count):
            ours, theirs = f"decoder.layers.{number}.", f"decoder.layers.{local}."
            mappings += _layer(namer, chunk, ours, theirs, spec.layers[number], layout)
            number += 1
    assert number == len(spec.layers), f"{number} layers in the chunks, {len(spec.layers)} in the model"
    for kind, parameter in spec.final_norm.parameters():
        name = f"decoder.final_layernorm.{kind}"
        mappings.append(namer.mapping(last, name, name, parameter))
    for depth, prediction in enumerate(spec.predictions):
        mappings += _prediction(namer, last, f"mtp.layers.{depth}.", prediction, layout)
    if not spec.tied:
        mappings.append(namer.vocabulary(OUTPUT_LAYER, [(last, OUTPUT_LAYER)], spec))
    return Table(mappings)


class _Parts:
    """Collects the parts of one of our parameters."""

    def __init__(self, ours: str, shape: Shape) -> None:
        self._ours, self._shape = ours, shape
        self._parts: list[Part] = []
        self._copies: list[Part] = []

    def add(self, our_box: Box, keys: Sequence[str], their_box: Box, extra: int = 0) -> None:
        """Elements `our_box` are elements `their_box` of each of the tensors `keys`, of which the first is read."""
        parts = [Part(self._ours, our_box, key, their_box, extra) for key in keys]
        self._parts.append(parts[0])
        self._copies += parts[1:]

    def mapping(self) -> Mapping:
        """The mapping of all that was added."""
        return Mapping(self._ours, self._shape, tuple(self._parts), tuple(self._copies))


class _Namer:
    """Makes the mappings of one layout."""

    def __init__(self, layout: CheckpointLayout) -> None:
        self._layout = layout

    def mapping(
        self, chunk: int, ours: str, theirs: str, parameter: ParamSpec, order: Sequence[RowRange] | None = None
    ) -> Mapping:
        """Any parameter but the vocabulary's, the experts' and those of `delta_net`. Theirs has one dim of rows where
        ours has two. order: the rows of each index of our first dim, where theirs has them in another order.
        """
        shape = parameter.shape
        if not parameter.shards and not self._cuts_rows(ours):
            return self.replicated(chunk, ours, theirs, shape)
        ((_, dim),) = parameter.shards or (("tp", 0),)
        is_bias = len(shape) == 1 or not ours.endswith("weight")
        if len(shape) > (1 if is_bias else 2):
            return self._flattened(chunk, ours, theirs, shape, dim, order)
        return self._sharded(chunk, ours, theirs, shape, dim)

    def replicated(self, chunk: int, ours: str, theirs: str, shape: Shape) -> Mapping:
        """A tensor that all ranks hold."""
        whole, parts = Box((0,) * len(shape), shape), _Parts(ours, shape)
        parts.add(whole, [self._layout.key(*rank, chunk, theirs) for rank in self._layout.ranks], whole)
        return parts.mapping()

    def delta_net(self, chunk: int, ours: str, theirs: str, shape: Shape, rows: dict[str, RowRange]) -> Mapping:
        """The projection of a delta net or its convolution. Ours [heads, rows, ...]; theirs, see `delta_parts`, has the
        rows of all heads of a rank."""
        parts = _Parts(ours, shape)
        for rank, piece in enumerate(self._pieces(shape, 0)):
            heads, zeros, row = piece.shape[0], (0,) * len(shape[2:]), 0
            for name, (first, count) in rows.items():
                if self._layout.splits_delta_nets:
                    keys, row = self._keys(rank, chunk, f"{theirs}.{name}"), 0
                else:
                    keys = self._keys(rank, chunk, theirs)
                for head in range(heads):
                    our_box = Box((piece.offset[0] + head, first, *zeros), (1, count, *shape[2:]))
                    parts.add(our_box, keys, Box((row, *zeros), (count, *shape[2:])))
                    row += count
        return parts.mapping()

    def experts(self, chunk: int, ours: str, theirs: str, name: str, parameter: ParamSpec) -> Mapping:
        """The experts' `name`. Ours [E, 2, f, h], [E, f, h] or [E, h, f], and for biases without the last dim; theirs
        lacks the dim of gate and up, and in a rank's file that of the experts. All ranks of etp have the whole bias of
        fc2."""
        layout, dims = self._layout, 2 if name.endswith("weight") else 1
        count, *front = parameter.shape[:-dims]
        size = list(parameter.shape[-dims:])
        (_, _), (_, dim) = parameter.shards
        held = count if layout.experts == GLOBAL else 1
        place, etp = dim - len(parameter.shape), 1 if name == "linear_fc2.bias" else layout.etp
        size[place] //= etp
        parts = _Parts(ours, parameter.shape)
        for first in range(0, count, held):
            ep_rank, number = divmod(first, count // layout.ep)
            their_name = theirs + layout.experts.format(name=name, number=number)
            for etp_rank in range(etp):
                holders = range(layout.etp) if etp < layout.etp else (etp_rank,)
                ranks = sorted(rank for holder in holders for rank in layout.ranks_of(holder, ep_rank))
                keys = [layout.key(t, e, chunk, their_name) for t, e in ranks]
                start = [0] * dims
                start[place] = etp_rank * size[place]
                for half in range(math.prod(front)):
                    our_box = Box((first, *(half for _ in front), *start), (held, *(1 for _ in front), *size))
                    their_box = Box((half * size[0], *(0 for _ in size[1:])), tuple(size))
                    if layout.experts == GLOBAL:
                        their_box = Box((0, *their_box.offset), (held, *their_box.shape))
                    parts.add(our_box, keys, their_box, extra=1 if layout.experts == GLOBAL else 0)
        return parts.mapping()

    def _cuts_rows(self, name: str) -> bool:
        """Returns whether Megatron-LM cuts the rows of a weight that all ranks hold here."""
        return name.endswith(".eh_proj.weight") or (self._layout.cuts_latents and name.endswith("_down_proj.weight"))

    def _sharded(self, chunk: int, ours: str, theirs: str, shape: Shape, dim: int) -> Mapping:
        """Cut along `dim`, with the same number of dims on both sides."""
        parts = _Parts(ours, shape)
        for rank, piece in enumerate(self._pieces(shape, dim)):
            parts.add(piece, self._keys(rank, chunk, theirs), Box((0,) * len(shape), piece.shape))
        return parts.mapping()

    def _flattened(
        self, chunk: int, ours: str, theirs: str, shape: Shape, dim: int, order: Sequence[RowRange] | None
    ) -> Mapping:
        """Ours [n, rows, ...] cut along `dim`; theirs [n' * rows', ...]: a rank's first two dims as one."""
        parts = _Parts(ours, shape)
        for rank, piece in enumerate(self._pieces(shape, dim)):
            rows, trailing_shape = piece.shape[1], piece.shape[2:]
            zeros, keys = tuple(0 for _ in trailing_shape), self._keys(rank, chunk, theirs)
            row = 0
            for number in range(piece.shape[0]):
                for first, count in order or [(0, rows)]:
                    start = piece.offset[0] + number, piece.offset[1] + first
                    our_box = Box((*start, *piece.offset[2:]), (1, count, *trailing_shape))
                    parts.add(our_box, keys, Box((row, *zeros), (count, *trailing_shape)))
                    row += count
        return parts.mapping()

    def vocabulary(self, ours: str, homes: Sequence[tuple[int, str]], spec: DecoderSpec) -> Mapping:
        """homes: (chunk, their name) of each copy."""
        shape, rows = spec.embedding.words.shape, self._layout.vocabulary
        columns, parts = shape[1], _Parts(ours, shape)
        for rank in range(self._layout.tp):
            first = rank * rows
            used = max(0, min(rows, spec.softmax_size - first))  # 0: a shard of padding, which is in the file, too
            our_box, inside = Box((first, 0), (used, columns)), Box((0, 0), (used, columns))
            keys = [key for chunk, theirs in homes for key in self._keys(rank, chunk, theirs)]
            parts.add(our_box, keys, inside)
        return parts.mapping()

    def _keys(self, tp_rank: int, chunk: int, theirs: str) -> list[str]:
        """The tensor in the files of all ranks that hold this shard."""
        return [self._layout.key(t, e, chunk, theirs) for t, e in self._layout.ranks if t == tp_rank]

    def _pieces(self, shape: Shape, dim: int) -> list[Box]:
        length = shape[dim] // self._layout.tp
        return [
            Box(
                tuple(rank * length if d == dim else 0 for d in range(len(shape))),
                tuple(length if d == dim else n for d, n in enumerate(shape)),
            )
            for rank in range(self._layout.tp)
        ]


def is_expert(name: str) -> bool:
    """Returns whether a tensor, by our name or theirs, is an expert's."""
    return ".mlp.experts." in name


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


def fused_norms(parts: dict[str, PartSpec], layout: CheckpointLayout) -> dict[str, str]:
    """Returns the linear layers of a layer with these parts that a norm is stored with, each with that norm."""
    pairs = ((linear, norm) for norm, linear in NORM_OF.items() if norm in parts and layout.fused_norms)
    fused = {linear: norm for linear, norm in pairs if linear in parts}
    if layout.fused_norms and IN_PROJ in parts and "input_layernorm" in parts:
        fused[IN_PROJ] = "input_layernorm"
    if layout.fused_expert_norms and "mlp.experts" in parts:
        fused["mlp.linear_fc1"] = "pre_mlp_layernorm"
    return fused


def _layer(
    namer: _Namer, chunk: int, ours: str, theirs: str, layer: LayerSpec, layout: CheckpointLayout
) -> Iterator[Mapping]:
    """The tensors of a layer, in the order of Megatron-LM's modules."""
    parts = dict(layer.parts())
    fused = fused_norms(parts, layout)
    for path in ORDER:
        if norm := fused.get(path):
            for kind, parameter in parts[norm].parameters():
                yield namer.mapping(chunk, f"{ours}{norm}.{kind}", f"{theirs}{path}.layer_norm_{kind}", parameter)
        if path not in parts or path in fused.values():
            continue
        part = parts[path]
        if isinstance(layer.attention, DeltaNetSpec) and path in (DECAY, IN_PROJ, CONVOLUTION):
            yield from _delta_net(namer, chunk, ours, theirs, path, layer.attention)
            continue
        order = gated_rows(layer.attention) if path == "self_attention.linear_qkv" else None
        for kind, parameter in part.parameters():
            name = f"{path}.{kind}"
            if isinstance(part, ExpertsSpec):
                yield namer.experts(chunk, ours + name, f"{theirs}{path}.", kind, parameter)
            else:
                yield namer.mapping(chunk, ours + name, theirs + name, parameter, order)
        if isinstance(part, RouterSpec) and part.has_bias:
            name = f"{path}.{EXPERT_BIAS}"
            yield namer.replicated(chunk, ours + name, theirs + name, (part.experts,))


def _delta_net(namer: _Namer, chunk: int, ours: str, theirs: str, path: str, spec: DeltaNetSpec) -> Iterator[Mapping]:
    """The tensors of the first projection, of the convolution or of the decay, which theirs holds without a module."""
    if path == DECAY:
        parameters = dict(spec.decay.parameters())
        for name in DECAYS:
            yield namer.mapping(chunk, f"{ours}{DECAY}.{name}", f"{theirs}self_attention.{name}", parameters[name])
        return
    part, rows = spec.in_proj if path == IN_PROJ else spec.convolution, delta_parts(spec.core, path)
    for name, parameter in part.parameters():
        yield namer.delta_net(chunk, f"{ours}{path}.{name}", f"{theirs}{path}.{name}", parameter.shape, rows)


def _prediction(
    namer: _Namer, chunk: int, beginning: str, prediction: PredictionSpec, layout: CheckpointLayout
) -> Iterator[Mapping]:
    """The tensors of a prediction of a further token, in the order of Megatron-LM's modules."""
    ours, theirs = (f"{beginning}{name}." for name in (PREDICTION_LAYER, layout.prediction_layer))
    parts = {path: part for path, part in prediction.parts() if not path.startswith(PREDICTION_LAYER)}
    for path, part in parts.items():
        if path == "final_layernorm":
            yield from _layer(namer, chunk, ours, theirs, prediction.layer, layout)
        for kind, parameter in part.parameters():
            name = f"{beginning}{path}.{kind}"
            yield namer.mapping(chunk, name, name, parameter)
