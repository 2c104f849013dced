"""Low-rank adapters of the parallel linear layers: see spec/lora.py."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.comm.regions import sum_partial, sum_partial_to_sequence_shard, to_shards
from megatron.core.parameter import Parameter
from megatron.core.recompute.rerun import checkpoint
from megatron.core.tensor_parallel.gemm_last import Prologue
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron.core.transformer.context import Build
from megatron.spec.decoder import LayerSpec
from megatron.spec.linear import COLUMN, REPLICATED, ROW, LinearSpec
from megatron.spec.lora import LoraSpec, is_adapter
from megatron.spec.parameter import ParamSpec, local_shape

Recomputed = tuple[Prologue, Tensor]  # a norm or an activation, and its input


def add_adapters(layer: nn.Module, build: Build, spec: LayerSpec) -> None:
    """Give the linear layers of a decoder layer the adapters that the configuration asks for."""
    lora = build.spec.lora
    if lora is None:
        return
    for path, linear in spec.linears().items():
        if lora.adapts(linear):
            module = layer.get_submodule(path)
            assert isinstance(module, ColumnParallelLinear | RowParallelLinear | ReplicatedLinear)
            module.lora = _ADAPTERS[linear.parallel](build, linear, lora)


def freeze_all_but_adapters(parameters: dict[str, Parameter]) -> None:
    """From now on only adapters are trained."""
    for name, parameter in parameters.items():
        parameter.requires_grad_(is_adapter(name))


class LoraMatrices(nn.Module):
    """The matrices A and B of one projection's adapter."""

    def __init__(self, build: Build, a: ParamSpec, b: ParamSpec) -> None:
        super().__init__()
        self.a, self.b = build.parameter(a), build.parameter(b)


class ColumnAdapters(nn.Module):
    """[s or s/tp, b, in] -> [s, b, out/tp], zero for projections without an adapter.

    Communication: forward an all-gather (sequence parallel) or nothing, backward a reduce-scatter or an all-reduce, of
    `rank` channels per projection.
    """

    def __init__(self, build: Build, linear: LinearSpec, lora: LoraSpec) -> None:
        super().__init__()
        tp = build.groups.tp.size
        for projection in linear.projections:
            if projection.name in lora.projections:
                self.add_module(projection.name, LoraMatrices(build, *lora.pair(linear, projection)))
        self._shapes = [
            (projection.name, local_shape(lora.pair(linear, projection)[1], {"tp": tp})[:-1])
            for projection in linear.projections
        ]
        self._join, self._build, self._lora = linear.join, build, lora

    def forward(self, x: Tensor, source: Recomputed | None = None) -> Tensor:
        """See the class, and `_narrowed` for `source`."""
        return _narrowed(self._product, x, source, self._build)

    def _product(self, x: Tensor) -> Tensor:
        build, linear = self._build, self._build.kernels.product
        pairs = {name: pair for name, pair in self.named_children() if isinstance(pair, LoraMatrices)}
        stream = "sharded" if build.sequence_parallel else "replicated"
        x = _dropout(x, build, self._lora.dropout, stream, self.training)
        narrow = linear(x, torch.cat([pair.a for pair in pairs.values()])) * self._lora.scale
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


class _ProjectionAdapter(nn.Module):
    """The adapter of a linear layer with one projection; a subclass says how the product is shared among ranks."""

    def __init__(self, build: Build, linear: LinearSpec, lora: LoraSpec) -> None:
        super().__init__()
        (projection,) = linear.projections
        self.add_module(projection.name, LoraMatrices(build, *lora.pair(linear, projection)))
        self._build, self._lora = build, lora

    def forward(self, x: Tensor, source: Recomputed | None = None) -> Tensor:
        """See the class, and `_narrowed` for `source`."""
        return _narrowed(self._product, x, source, self._build)

    @abstractmethod
    def _product(self, x: Tensor) -> Tensor:
        """Returns the adapter's output."""


class ReplicatedAdapter(_ProjectionAdapter):
    """[s or s/tp, b, in] -> [s or s/tp, b, out], of a layer that every rank of tp holds. No communication."""

    def _product(self, x: Tensor) -> Tensor:
        (pair,), linear = self.children(), self._build.kernels.product
        assert isinstance(pair, LoraMatrices)
        stream = "sharded" if self._build.sequence_parallel else "replicated"
        x = _dropout(x, self._build, self._lora.dropout, stream, self.training)
        return linear(linear(x, pair.a) * self._lora.scale, pair.b)


class RowAdapter(_ProjectionAdapter):
    """[s, b, in/tp] -> [s or s/tp, b, out].

    Communication: forward a reduce-scatter (sequence parallel) or an all-reduce, backward an all-gather or nothing, of
    `rank` channels.
    """

    def _product(self, x: Tensor) -> Tensor:
        build, linear = self._build, self._build.kernels.product
        (pair,) = self.children()
        assert isinstance(pair, LoraMatrices)
        narrow = linear(_dropout(x, build, self._lora.dropout, "sharded", self.training), pair.a) * self._lora.scale
        if build.sequence_parallel:
            return linear(sum_partial_to_sequence_shard(narrow, build.groups.tp), pair.b)
        return linear(sum_partial(narrow, build.groups.tp, build.all_reduce), pair.b)


_ADAPTERS = {COLUMN: ColumnAdapters, ROW: RowAdapter, REPLICATED: ReplicatedAdapter}


def _narrowed(product: Callable[[Tensor], Tensor], x: Tensor, source: Recomputed | None, build: Build) -> Tensor:
    """product(x). With `source`, backward computes x from it again, and the products of `rank` channels with x."""
    if source is None:
        return product(x)
    first, before = source
    return checkpoint(product, [x], build.rng, source=(lambda *xs: [first.compute(*xs)[0]], first.operands(before)))


def _dropout(x: Tensor, build: Build, probability: float, stream: str, training: bool) -> Tensor:
    if probability == 0.0 or not training:
        return x
    with build.rng.stream(stream):
        return F.dropout(x, probability)
