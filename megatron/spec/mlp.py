"""The feed-forward layer as data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.base.box import Box
from megatron.config.model import ModelConfig
from megatron.spec.linear import COLUMN, ROW, LinearSpec, Projection
from megatron.spec.parameter import CHANNELS, Init, ParamSpec

SWIGLU, GEGLU, GEGLU_TANH, QUICK_GEGLU = "swiglu", "geglu", "geglu_tanh", "quick_geglu"
GELU, GELU_TANH, SQUARED_RELU, XIELU = "gelu", "gelu_tanh", "squared_relu", "xielu"
XIELU_BETA, XIELU_ALPHA = 0.5, 0.8  # the slope at zero; the initial curvature on both sides of it


@dataclass(frozen=True)
class GateForm:
    """limit: the gate is at most this, and up between this and its negative; None: they are as they are. offset: is
    added to up."""

    limit: float | None = None
    offset: float = 0.0

    def copies_of_operands(self) -> int:
        """Tensors as large as the result that plain torch makes of gate and up."""
        return 2 if self.limit is not None else int(self.offset != 0.0)


PLAIN_GATE = GateForm()


@dataclass(frozen=True)
class XieluSpec:
    """The two trained numbers of xIELU (Huang and Schlag, arXiv 2411.13010), of one element each: see
    kernels/ops/xielu.py. Every rank of tp holds them, and applies them to its part of the inner channels."""

    def parameters(self) -> Iterator[tuple[str, ParamSpec]]:
        """(name, parameter), in the order of the module."""
        for name, curvature in (("alpha_p", XIELU_ALPHA), ("alpha_n", XIELU_ALPHA - XIELU_BETA)):
            init = Init("constant", math.log(math.expm1(curvature)))  # the inverse of softplus
            yield name, ParamSpec((1,), init, decay=False, input_sharding=CHANNELS)


@dataclass(frozen=True)
class MLPSpec:
    """fc2(activation(fc1(x))). A gated activation reads gate and up, which fc1 stores as one [2, width, h] weight that
    is sharded along the width."""

    linear_fc1: LinearSpec
    linear_fc2: LinearSpec
    activation: str
    width: int
    gate: GateForm = PLAIN_GATE

    @property
    def gated(self) -> bool:
        """Whether the activation halves its input."""
        return len(self.linear_fc1.projections) == 2

    @property
    def xielu(self) -> XieluSpec | None:
        """The parameters of the activation, or None where it has none."""
        return XieluSpec() if self.activation == XIELU else None

    def parts(self) -> Iterator[tuple[str, LinearSpec | XieluSpec]]:
        """(path, spec) of the modules with parameters, in the order in which they are made."""
        yield "linear_fc1", self.linear_fc1
        yield "linear_fc2", self.linear_fc2
        if self.xielu is not None:
            yield "activation_func", self.xielu


def mlp_spec(
    hidden: int,
    width: int,
    activation: str,
    *,
    gated: bool,
    bias: bool,
    init: Init,
    output_init: Init,
    gate: GateForm = PLAIN_GATE,
) -> MLPSpec:
    """An MLP of `width` inner channels per token."""
    if gated:
        boxes = {"gate_proj": Box((0, 0), (1, width)), "up_proj": Box((1, 0), (1, width))}
    else:
        boxes = {"up_proj": Box((0,), (width,))}
    projections = tuple(Projection(name, box) for name, box in boxes.items())
    out_shape = (2, width) if gated else (width,)
    down = (Projection("down_proj", Box((0,), (hidden,))),)
    return MLPSpec(
        LinearSpec(hidden, out_shape, COLUMN, projections, has_bias=bias, init=init, dim=len(out_shape) - 1),
        LinearSpec(width, (hidden,), ROW, down, has_bias=bias, init=output_init),
        activation,
        width,
        gate,
    )


def activation_copies(activation: str, gate: GateForm, *, backward: bool) -> int:
    """Tensors as large as the result of an activation that plain torch needs at once, besides its result, in the
    gradient the gradient of its input: of operands, and of intermediate results."""
    intermediate = int(activation == QUICK_GEGLU)
    if not backward:
        return gate.copies_of_operands() + intermediate
    return 2 + int(gate.limit is not None) + intermediate


def gate_form(model: ModelConfig) -> GateForm:
    """Returns the limit and the offset of gated activations."""
    return GateForm(model.activation_func_clamp_value, model.glu_linear_offset)


def activation_of(model: ModelConfig) -> str:
    """Returns the name of the activation of the MLPs."""
    if model.swiglu:
        return SWIGLU
    if model.quick_geglu:
        return QUICK_GEGLU
    if model.squared_relu:
        return SQUARED_RELU
    if model.xielu:
        return XIELU
    if model.geglu:
        return GEGLU_TANH if model.tanh_gelu else GEGLU
    return GELU_TANH if model.tanh_gelu else GELU
