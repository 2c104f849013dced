"""Low-rank adapters beside the parallel linear layers (LoRA, Hu et al., arXiv 2106.09685).

y = W x + alpha / r * B A dropout(x). W is frozen; A [r, in] starts random, B [out, r] at zero. Every projection has
its own pair, also where several share one weight of ours: so an adapter is one of PEFT's, both ways.

Over tp, A is whole and B is cut beside a column layer, A is cut and B is whole beside a row layer. What travels is r wide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.base.box import Box
from megatron.config.model import ModelConfig
from megatron.core.comm.regions import sum_partial, sum_partial_to_sequence_shard, to_shards
from megatron.core.memory.checkpoint import checkpoint
from megatron.core.parameter import Init, Parameter, cut, make_parameter
from megatron.core.tensor_parallel.gemm_last import Prologue
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.context import Build
from megatron.kernels.ops.gemm import linear

Source = tuple[Prologue, Tensor]  # a norm or an activation, and what it reads


@dataclass(frozen=True)
class Piece:
    """A projection, and the outputs of our weight that are its own: a rectangle of all dims but the last.

    divided: see `parameter.cut`, of a column layer's outputs.
    """

    projection: str
    outputs: Box
    divided: int | None = None


@dataclass(frozen=True)
class Adapted:
    """A linear layer of ours that has adapters.

    name: of the layer in its decoder layer. pieces: all projections in its weight, in order, with or without an
    adapter. join: the dim along which they follow each other. tp_dim: the weight's dim that is cut over tp.
    """

    name: str
    inputs: int
    pieces: tuple[Piece, ...]
    join: int
    tp_dim: int


def adapted_linears(model: ModelConfig) -> list[Adapted]:
    """The layers with an adapter of a decoder layer; the same in all of them."""
    assert model.hidden_size and model.num_attention_heads
    h, f, d, groups = model.hidden_size, model.ffn_dim, model.head_dim, model.num_kv_heads
    queries = model.num_attention_heads // groups * d
    qkv = (
        Piece("q_proj", Box((0, 0), (groups, queries)), divided=queries),
        Piece("k_proj", Box((0, queries), (groups, d)), divided=0),
        Piece("v_proj", Box((0, queries + d), (groups, d)), divided=0),
    )
    gate_up = (Piece("gate_proj", Box((0, 0), (1, f))), Piece("up_proj", Box((1, 0), (1, f))))
    up = (Piece("up_proj", Box((0,), (f,))),)
    linears = [
        Adapted("self_attention.linear_qkv", h, qkv, join=1, tp_dim=0),
        Adapted("self_attention.linear_proj", model.num_attention_heads * d, _whole("o_proj", h), join=0, tp_dim=1),
        Adapted("mlp.linear_fc1", h, gate_up if model.swiglu else up, join=0, tp_dim=1 if model.swiglu else 0),
        Adapted("mlp.linear_fc2", f, _whole("down_proj", h), join=0, tp_dim=1),
    ]
    asked = set(model.lora_projections)
    return [linear for linear in linears if asked & {piece.projection for piece in linear.pieces}]


def adapter_names(linear: str, projection: str) -> tuple[str, str]:
    """Names of the two weights of a projection; `linear` is the name of the layer they are beside."""
    return f"{linear}.lora.{projection}.a", f"{linear}.lora.{projection}.b"


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora." in name


def add_adapters(layer: nn.Module, build: Build) -> None:
    """Give the linear layers of a decoder layer the adapters that the configuration asks for."""
    for adapted in adapted_linears(build.config):
        linear_layer = layer.get_submodule(adapted.name)
        assert isinstance(linear_layer, ColumnParallelLinear | RowParallelLinear)
        kind = ColumnAdapters if isinstance(linear_layer, ColumnParallelLinear) else RowAdapter
        linear_layer.lora = kind(adapted, build)


def freeze_all_but_adapters(parameters: dict[str, Parameter]) -> None:
    """From now on only adapters are trained."""
    for name, parameter in parameters.items():
        parameter.requires_grad_(is_adapter(name))


class Pair(nn.Module):
    """A and B of one projection; one of them is cut over tp, along `tp_dim` of its shape."""

    def __init__(self, build: Build, inputs: int, piece: Piece, *, a_tp_dim: int | None, b_tp_dim: int | None) -> None:
        super().__init__()
        rank, groups = build.config.lora_rank, build.groups
        assert rank
        # PEFT's initial values: Kaiming-uniform with a = sqrt(5), which is 1 / sqrt(in).
        self.a = make_parameter(
            (rank, inputs),
            Init("uniform", 1.0 / math.sqrt(inputs)),
            dtype=build.dtype,
            device=build.device,
            tp=groups.tp,
            tp_dim=a_tp_dim,
            sum_over_tp=a_tp_dim is None and build.sequence_parallel,
        )
        self.b = make_parameter(
            (*piece.outputs.shape, rank),
            Init("constant", 0.0),
            dtype=build.dtype,
            device=build.device,
            tp=groups.tp,
            tp_dim=b_tp_dim,
            divided=piece.divided,
            sum_over_tp=b_tp_dim is None and build.sequence_parallel,
        )


class ColumnAdapters(nn.Module):
    """[s or s/tp, b, in] -> [s, b, out/tp], zero for projections without an adapter.

    Communication: forward an all-gather (sequence parallel) or nothing, backward a reduce-scatter or an all-reduce, of
    r channels a projection.
    """

    def __init__(self, adapted: Adapted, build: Build) -> None:
        super().__init__()
        config, tp = build.config, build.groups.tp
        for piece in adapted.pieces:
            if piece.projection in config.lora_projections:
                pair = Pair(build, adapted.inputs, piece, a_tp_dim=None, b_tp_dim=adapted.tp_dim)
                self.add_module(piece.projection, pair)
        self._shapes = [
            (piece.projection, cut(piece.outputs.shape, tp, adapted.tp_dim, piece.divided)[0])
            for piece in adapted.pieces
        ]
        self._join, self._build = adapted.join, build

    def forward(self, x: Tensor, source: Source | None = None) -> Tensor:
        """See the class, and `_narrowed` for `source`."""
        return _narrowed(self._product, x, source, self._build)

    def _product(self, x: Tensor) -> Tensor:
        build = self._build
        pairs = {name: pair for name, pair in self.named_children() if isinstance(pair, Pair)}
        x = _dropout(x, build, "sharded" if build.sequence_parallel else "replicated", self.training)
        narrow = linear(x, torch.cat([pair.a for pair in pairs.values()])) * _scale(build.config)
        narrow = to_shards(narrow, build.groups.tp, build.sequence_parallel)
        inputs = dict(zip(pairs, narrow.chunk(len(pairs), dim=-1), strict=True))
        s, b, _ = narrow.shape
        outputs = [
            linear(inputs[name], pairs[name].b.flatten(0, -2)).view(s, b, *shape)
            if name in pairs
            else narrow.new_zeros(s, b, *shape)
            for name, shape in self._shapes
        ]
        return torch.cat(outputs, dim=2 + self._join).flatten(2)


class RowAdapter(nn.Module):
    """[s, b, in/tp] -> [s or s/tp, b, out].

    Communication: forward a reduce-scatter (sequence parallel) or an all-reduce, backward an all-gather or nothing, of
    r channels.
    """

    def __init__(self, adapted: Adapted, build: Build) -> None:
        super().__init__()
        (piece,) = adapted.pieces
        self.add_module(piece.projection, Pair(build, adapted.inputs, piece, a_tp_dim=adapted.tp_dim, b_tp_dim=None))
        self._build = build

    def forward(self, x: Tensor, source: Source | None = None) -> Tensor:
        """See the class, and `_narrowed` for `source`."""
        return _narrowed(self._product, x, source, self._build)

    def _product(self, x: Tensor) -> Tensor:
        build = self._build
        (pair,) = self.children()
        assert isinstance(pair, Pair)
        narrow = linear(_dropout(x, build, "sharded", self.training), pair.a) * _scale(build.config)
        total = sum_partial_to_sequence_shard if build.sequence_parallel else sum_partial
        return linear(total(narrow, build.groups.tp), pair.b)


def _narrowed(product: Callable[[Tensor], Tensor], x: Tensor, source: Source | None, build: Build) -> Tensor:
    """product(x). With `source`, x is computed from it again in backward, and the products with r channels with it."""
    if source is None:
        return product(x)
    first, before = source
    return checkpoint(product, [x], build.rng, source=(lambda *xs: [first.compute(*xs)[0]], first.operands(before)))


def _whole(projection: str, outputs: int) -> tuple[Piece, ...]:
    return (Piece(projection, Box((0,), (outputs,))),)


def _scale(config: ModelConfig) -> float:
    assert config.lora_rank
    return config.lora_alpha / config.lora_rank


def _dropout(x: Tensor, build: Build, stream: str, training: bool) -> Tensor:
    if build.config.lora_dropout == 0.0 or not training:
        return x
    with build.rng.stream(stream):
        return F.dropout(x, build.config.lora_dropout)
