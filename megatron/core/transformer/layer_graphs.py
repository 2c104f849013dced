"""The layers of a pipeline stage as CUDA graphs: one for the forward of each layer, and one for its backward.

[Note: slots]
A microbatch that has run forward needs memory of its own until its backward. A slot is such memory with the graphs that
use it: a stage has as many slots as it has microbatches under way at once, one without a pipeline. The graphs of a slot
share a pool, and are always replayed in the order of their capture: the forwards of the layers, then the backwards in
reverse. Two slots take turns in any order, so each has a pool.

[Note: what the host does at a replay]
A layer's forward waits for its parameters if they are still being gathered, and its backward tells DataParallel which
gradients have arrived, so buckets leave in the same order as without graphs, one layer at a time. In a graph weight
gradients are always added: the first backward of a step sets them to zero before. Everything else that the host does in
a layer happened at the capture: collectives of a layer are neither announced nor followed by the heartbeat. A hang in
one shows in the next collective behind it.

Between two graphs there is one tensor, the residual stream: the last addition of a layer is a kernel of its own, and
not part of the next layer's norm.

[Note: when graphs are captured]
At the beginning of a step, after some steps without graphs: by then kernels are loaded, communicators and work spaces
made, and no message of a pipeline is on its way, so the host may wait for the device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.data_parallel import Arrival, DataParallel
from megatron.core.streams.graph import Graph, GraphPool
from megatron.core.transformer.context import Positions

Tables = tuple[tuple[Tensor, Tensor], ...]  # see Positions


class LayerGraphs:
    """Runs the layers of this rank's stages by graphs, once they are captured."""

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        data_parallel: DataParallel,
        make_pool: Callable[[], GraphPool],
        *,
        warmup_steps: int,
    ) -> None:
        """layers: this rank's, by their number in the whole model. warmup_steps: steps without graphs, at least one."""
        self._layers, self._data_parallel, self._make_pool = layers, data_parallel, make_pool
        self._warmup_steps, self._steps = warmup_steps, 0
        self._inputs: dict[range, tuple[Tensor, Tables]] = {}  # of each stage, without values: on the "meta" device
        self._slots: dict[range, int] = {}
        self._free: dict[range, list[_Slot]] = {}

    def begin_step(self, slots: Mapping[range, int]) -> None:
        """Call before the first forward of a step. Waits for the device when it captures.

        slots: the layers of a stage -> microbatches between their forward and their backward, at most.
        """
        self._steps += 1
        if self._steps <= self._warmup_steps:
            return
        for layers, most in slots.items():
            if layers in self._inputs:
                for _ in range(self._slots.get(layers, 0), most):
                    self._free.setdefault(layers, []).append(self._capture(layers))
                self._slots[layers] = max(most, self._slots.get(layers, 0))

    def run(self, x: Tensor, positions: Positions, layers: range) -> Tensor | None:
        """[s or s/tp, b, h] -> the same, through `layers`; None where there are no graphs for it: in the first steps,
        in evaluation, and for microbatches of another shape.
        """
        if not (layers and torch.is_grad_enabled() and self._layers[layers.start].training and x.requires_grad):
            return None
        assert positions.segments is None, "documents have lengths that a graph would fix"
        if self._steps <= self._warmup_steps:
            self._inputs[layers] = _meta(x), tuple((_meta(cos), _meta(sin)) for cos, sin in positions.rotary)
            return None
        free = self._free.get(layers)
        if not free or not free[-1].fits(x, positions.rotary):
            return None
        slot = free.pop()
        out: Tensor = _Replay.apply(x, positions.rotary, slot, free)
        return out

    def _capture(self, layers: range) -> _Slot:
        example, tables = self._inputs[layers]
        modules = [self._layers[number] for number in layers]
        x = self._zeros(example).requires_grad_()
        static = tuple((self._zeros(cos), self._zeros(sin)) for cos, sin in tables)
        # Parameters may still be being gathered, and a captured kernel could not wait for them.
        self._data_parallel.synchronize()
        with self._data_parallel.timeline.paused():
            return self._capture_layers(modules, x, static, self._make_pool())

    def _zeros(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like, device=self._data_parallel.device)

    def _capture_layers(self, modules: Sequence[nn.Module], x: Tensor, tables: Tables, pool: GraphPool) -> _Slot:
        positions, inputs, outputs, forwards = Positions(tables, None), [x], list[Tensor](), list[_Forward]()
        for module in modules:
            graph, read = pool.graph(), inputs[-1]
            with torch.enable_grad():
                outputs.append(graph.capture(functools.partial(module, read, positions)))
            forwards.append(_Forward(graph, list(module.parameters())))
            inputs.append(outputs[-1].detach().requires_grad_())
        out, grad = inputs.pop().detach(), torch.zeros_like(outputs[-1], requires_grad=False)
        backwards, passed = list[_Backward](), grad
        # What a backward frees serves the ones behind it: of each layer only the gradient of its input is held, until
        # the next one has read it.
        while outputs:
            graph, written, read = pool.graph(), outputs.pop(), inputs.pop()
            with self._data_parallel.capturing() as arrivals:
                graph.capture(functools.partial(torch.autograd.backward, written, passed))
            backwards.append(_Backward(graph, arrivals))
            assert read.grad is not None
            passed, read.grad = read.grad, None
        return _Slot(self._data_parallel, x.detach(), tables, forwards, out, grad, backwards, passed)


@dataclass(frozen=True)
class _Forward:
    """The forward of a layer, and the parameters that it reads."""

    graph: Graph
    parameters: list[nn.Parameter]


@dataclass(frozen=True)
class _Backward:
    """The backward of a layer, and the gradients that it completes."""

    graph: Graph
    arrivals: list[Arrival]


@dataclass(frozen=True)
class _Slot:
    """Graphs and their static tensors: inputs, output and their gradients. See [Note: slots].

    Results leave as copies: a message may still be reading them when the slot is used again.
    """

    data_parallel: DataParallel
    x: Tensor
    tables: Tables
    forwards: list[_Forward]
    out: Tensor
    grad: Tensor
    backwards: list[_Backward]
    grad_x: Tensor

    def fits(self, x: Tensor, tables: Tables) -> bool:
        """Whether the graphs were captured for such inputs."""
        inputs = [x, *itertools.chain(*tables)]
        static = [self.x, *itertools.chain(*self.tables)]
        return [(tensor.shape, tensor.dtype) for tensor in inputs] == [
            (tensor.shape, tensor.dtype) for tensor in static
        ]

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        """Replays the forwards."""
        self.x.copy_(x)
        for static, value in zip(itertools.chain(*self.tables), itertools.chain(*tables), strict=True):
            static.copy_(value)
        for layer in self.forwards:
            self.data_parallel.before_read(layer.parameters)
            layer.graph.replay()
        return self.out.clone()

    def backward(self, grad: Tensor) -> Tensor:
        """Replays the backwards; the gradient of x."""
        self.grad.copy_(grad)
        for layer in self.backwards:
            self.data_parallel.before_replay(layer.arrivals)
            layer.graph.replay()
            self.data_parallel.arrived(layer.arrivals)
        return self.grad_x.clone()


class _Replay(torch.autograd.Function):
    """(x, tables, slot, where the slot goes after its backward) -> output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tables: Tables, slot: _Slot, free: list[_Slot]) -> Tensor:
        ctx.slot, ctx.free = slot, free
        return slot.forward(x, tables)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = ctx.slot.backward(grad)
        ctx.free.append(ctx.slot)
        return grad_x, None, None, None


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=False)
