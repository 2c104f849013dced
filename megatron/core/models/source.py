"""Where the weights of a model come from: named as ours, in any rectangle of their global shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.config.model import ModelConfig
from megatron.core.models.carried import CarriedTensors
from megatron.core.parameter import Parameter
from megatron.spec.moe import EXPERT_BIAS

CHOICE_BIAS = "e_score_correction_bias"  # the bias of the choice of experts, as transformers calls it


class Source(Protocol):
    """A model's weights, read piece by piece.

    shapes: names and global shapes of our parameters, and of the biases of experts. dtype: the one that most of the
    weights are stored in.
    """

    model: ModelConfig
    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype

    @property
    def carried(self) -> CarriedTensors:
        """Tensors that belong to the model and are no weights here."""
        ...

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Elements `box` of our global tensor `name`, rounded once to `dtype`, in memory that is the caller's."""
        ...


def is_buffer(name: str) -> bool:
    """Returns whether a tensor of a model, in any format, is no parameter: the bias of the choice of experts, without a
    gradient."""
    return name.endswith((f".{EXPERT_BIAS}", f".{CHOICE_BIAS}"))


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a model of `dtype` stores a tensor: buffers are fp32 in all of them."""
    return torch.float32 if is_buffer(name) else dtype


@torch.no_grad()
def fill(parameters: dict[str, Parameter], source: Source, buffers: Mapping[str, Tensor] | None = None) -> None:
    """Load a rank's parameters: each reads its own piece. Local. Raises CheckpointError for the weights of another
    model.

    buffers: those of the model, of which biases of the choice of experts are read.
    """
    whole = {name: buffer for name, buffer in (buffers or {}).items() if is_buffer(name)}
    shapes = {name: parameter.info.spec.shape for name, parameter in parameters.items()}
    for name, expected in (shapes | {name: tuple(buffer.shape) for name, buffer in whole.items()}).items():
        if (shape := source.shapes.get(name)) != expected:
            raise CheckpointError(
                f"the weights are of another model: {name} is {list(shape) if shape else 'not among them'}, and the "
                f"model calls for {list(expected)}"
            )
    for name, buffer in whole.items():
        buffer.copy_(source.read(name, Box((0,) * buffer.dim(), tuple(buffer.shape)), buffer.dtype))
    for name, parameter in parameters.items():
        for section in parameter.info.sections:
            section.of(parameter.detach()).copy_(source.read(name, Box(section.offset, section.shape), parameter.dtype))
