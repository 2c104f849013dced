"""Turns the operations of this project's layers into those of another framework.

The traffic of plain torch is the sum over its kernels, of which a norm runs in fp32. In channels per token, as in
planner/time/operations.py:

| | forward | backward |
|---|---|---|
| norm, width h | 18 h | 30 h |
| rotary, c = (heads + groups) d, in fp32 | 25 c | 25 c |
| gated activation, width f | 5 f | 11 f |
| plain activation | 4 f | 5 f |
| loss, per logit in bytes | 34 | 20 |
| sum of a weight's gradient in fp32 (bf16), in bytes | | 10 (6) |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.planner.calibration.framework import FUSED_SOFTMAX, Framework
from megatron.base.errors import ConfigError
from megatron.config.recompute import RecomputeConfig
from megatron.planner.time.model_work import ModelWork
from megatron.planner.time.operations import (
    CHANNEL,
    FORWARD,
    FUSED,
    INPUT_GRAD,
    SLOW_SOFTMAX,
    WEIGHT_GRAD,
    Gemm,
    LayerMessage,
    LayerOperation,
    LayerWork,
    Traffic,
    head_work,
    repeated,
)
from megatron.spec.collectives import ALL_GATHER, Collective
from megatron.spec.mlp import MLPSpec
from megatron.spec.moe import MoESpec
from megatron.spec.sizes import FP32, Sizes

PLAIN = "plain"  # kind of traffic that was counted for kernels of plain torch
_LATENTS = ("q down", "q up", "kv down", "kv up")
_LINEARS, _COLUMNS = ("qkv", *_LATENTS, "proj", "fc1", "fc2"), ("qkv", "q up", "kv up", "fc1", "head")
_PREDICTION = "prediction's projection"
_PRODUCTS = (*_LINEARS, "head", _PREDICTION, "router", "experts fc1", "experts fc2", "scores", "values")
_SENDERS = (*_LINEARS, "embedding", "head", "loss", "attention", "experts")  # names of messages
_LOSS, _LOSS_GRADIENT = "loss", "loss gradient"
# Name of traffic -> (option of Framework, channels that a fused kernel moves, channels that plain torch moves).
_NORM, _NORM_GRADIENT = ("fused_norm", 2, 18), ("fused_norm", 3, 30)
_NORMS = ("attention norm", "MLP norm", "post norm", "norm of the known token", "norm of hidden states", "final norm")
_COUNTS = {
    **dict.fromkeys(_NORMS, _NORM),
    **{f"{name}, gradient": _NORM_GRADIENT for name in _NORMS},
    "rotary": ("fused_pointwise", 2, 25),
    "rotary gradient": ("fused_pointwise", 2, 25),
    _LOSS: ("fused_loss", 10, 34),
    _LOSS_GRADIENT: ("fused_loss", 6, 20),
}
_GATED = {"activation": ("fused_pointwise", 3, 5), "activation gradient": ("fused_pointwise", 5, 11)}
_UNGATED = {"activation": ("fused_pointwise", 2, 4), "activation gradient": ("fused_pointwise", 3, 5)}
# The same in every framework: heads of latent attention, for example, are put together by copies.
_ALIKE = ("residual", "residual gradient", "permute", "heads", "heads gradient", "embedding", "embedding gradient")


def as_framework(work: ModelWork, recompute: RecomputeConfig, framework: Framework) -> ModelWork:
    """Returns the operations of a run's model in another framework, from this project's own.

    recompute: of the run. Raises ConfigError for an operation that no framework is known for.
    """
    works = []
    for kind, layer_work in enumerate(work.works):
        number = work.kinds.index(kind)
        change = _Change(framework, work.sizes, _is_gated(work.spec.layers[number].mlp))
        works.append(change.layer(layer_work, recompute.parts_of(number)))
    head = _with_whole_logits(work) if framework.whole_logits else work.head
    return dataclasses.replace(work, works=tuple(works), head=_Change(framework, work.sizes, False).end(head))


def _with_whole_logits(work: ModelWork) -> LayerWork:
    """The head where forward computes it and the loss, of all tokens at once."""
    head = head_work(work.spec, dataclasses.replace(work.sizes, loss_chunk=None))
    forward, backward = list(head.forward), list[LayerOperation]()
    is_before_gradient = True
    for operation in head.input_grad:  # of each prediction: the head, the loss, its gradient, the head's, a norm's
        is_before_gradient &= operation.name != _LOSS_GRADIENT
        is_of_loss = operation.name in ("head", _LOSS)
        (forward if is_before_gradient and is_of_loss else backward).append(operation)
        is_before_gradient |= operation.name == "final norm, gradient"
    return dataclasses.replace(head, forward=tuple(forward), input_grad=tuple(backward))


def _is_gated(mlp: MLPSpec | MoESpec) -> bool:
    return mlp.gated if isinstance(mlp, MLPSpec) else mlp.experts.gated


@dataclass(frozen=True)
class _Change:
    """The changes of the operations of a layer. gated: it has a gated activation."""

    framework: Framework
    sizes: Sizes
    gated: bool

    def layer(self, work: LayerWork, modules: frozenset[str]) -> LayerWork:
        """modules: those that backward repeats."""
        forward = [
            (module, changed)
            for module, operation in zip(work.modules, work.forward, strict=True)
            for changed in self._operation(operation, FORWARD)
        ]
        changed = dataclasses.replace(
            self.end(work),
            forward=tuple(operation for _, operation in forward),
            modules=tuple(module for module, _ in forward),
        )
        again = _every_second(changed.forward) if self.framework.recompute_half else repeated(changed, modules)
        return dataclasses.replace(changed, again=tuple(again))

    def end(self, work: LayerWork) -> LayerWork:
        """The same without repeated operations and modules."""
        return dataclasses.replace(
            work,
            forward=tuple(self._operations(work.forward, FORWARD)),
            input_grad=tuple(self._operations(work.input_grad, INPUT_GRAD)),
            weight_grad=tuple(self._operations(work.weight_grad, WEIGHT_GRAD)),
        )

    def _operations(self, operations: Iterable[LayerOperation], phase: str) -> Iterator[LayerOperation]:
        for operation in operations:
            yield from self._operation(operation, phase)

    def _operation(self, operation: LayerOperation, phase: str) -> Iterator[LayerOperation]:
        if isinstance(operation, Traffic):
            yield from self._traffic(operation)
        elif isinstance(operation, Gemm):
            yield from self._product(operation)
        elif isinstance(operation, LayerMessage):
            yield from self._message(operation, phase)
        else:
            yield operation

    def _traffic(self, traffic: Traffic) -> Iterator[LayerOperation]:
        framework, tp = self.framework, self.sizes.tp
        if traffic.name == "softmax" and framework.attention == FUSED_SOFTMAX:
            yield dataclasses.replace(traffic, nbytes=traffic.nbytes / SLOW_SOFTMAX)
            return
        if traffic.name in (_LOSS, _LOSS_GRADIENT) and framework.gathered_loss:
            if traffic.name == _LOSS and tp > 1:
                nbytes = traffic.nbytes / _COUNTS[_LOSS][1] * CHANNEL
                yield LayerMessage("loss", Collective(ALL_GATHER, "tp", int(nbytes)))
                yield Traffic("copies of the logits", 4 * tp * nbytes)
            traffic = dataclasses.replace(traffic, nbytes=tp * traffic.nbytes)
        if traffic.kind != FUSED or traffic.name in _ALIKE:
            yield traffic
            return
        option, fused, plain = self._count(traffic.name)
        if getattr(framework, option):
            yield traffic
        else:
            yield Traffic(traffic.name, traffic.nbytes * plain / fused, PLAIN)

    def _count(self, name: str) -> tuple[str, int, int]:
        count = {**_COUNTS, **(_GATED if self.gated else _UNGATED)}.get(name)
        if count is None:
            raise _unknown(name)
        return count

    def _product(self, product: Gemm) -> Iterator[LayerOperation]:
        linear = product.name.partition(", ")[0]
        if linear not in _PRODUCTS:
            raise _unknown(linear)
        changed = self._accumulated(product)
        yield changed
        if changed is not product:  # reads the gradient and the sum, and writes the sum
            moved = CHANNEL + 2 * (CHANNEL if self.framework.half_gradients else FP32)
            yield Traffic(f"{linear}, sum of gradients", moved * product.n * product.m)
        if product.name == "fc1, input gradient" and self._splits_gate:
            moved = 3 * CHANNEL * self.sizes.tokens * self.sizes.h
            yield Traffic("sum of two gradients", moved)

    def _accumulated(self, product: Gemm) -> Gemm:
        """The gradient of a decoder layer's weight, perhaps without its sum."""
        linear, _, gradient = product.name.partition(", ")
        if self.framework.fused_accumulation or gradient != "weight gradient" or linear not in _LINEARS:
            return product
        return dataclasses.replace(product, accumulates=False)

    def _message(self, message: LayerMessage, phase: str) -> Iterator[LayerOperation]:
        framework = self.framework
        if message.name not in _SENDERS:
            raise _unknown(message.name)
        if message.name == _LOSS and framework.gathered_loss:
            return  # every rank has all logits
        column = message.name in _COLUMNS
        if column and framework.keeps_gathered and phase == INPUT_GRAD and message.call.op == ALL_GATHER:
            return
        if isinstance(message.behind, Gemm):
            message = dataclasses.replace(message, behind=self._accumulated(message.behind))
        yield message
        gathered_once = framework.keeps_gathered and self.sizes.sp > 1
        if message.name == "fc1" and self._splits_gate and not gathered_once:
            yield message

    @property
    def _splits_gate(self) -> bool:
        return self.gated and self.framework.split_gate


def _unknown(name: str) -> ConfigError:
    return ConfigError(
        f"the operation {name!r} is not known for other frameworks; add it to "
        "benchmarks/planner/calibration/framework_work.py"
    )


def _every_second(operations: Iterable[LayerOperation]) -> Iterator[LayerOperation]:
    """All computations that are no product, and every second product."""
    number = 0
    for operation in operations:
        if isinstance(operation, Gemm):
            number += 1
            if number % 2 == 0:
                yield operation
        elif isinstance(operation, Traffic):
            yield operation
