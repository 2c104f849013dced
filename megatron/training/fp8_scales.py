"""The scales of FP8 products that follow the largest values of earlier steps (delayed scaling).

[Note: delayed scaling]
Each FP8 layer quantizes three tensors: its input, its weight and the gradient of its output. A tensor that is quantized
with a scale made for its present values has to be read twice; so the scale is made for the largest absolute value
(amax) of earlier steps, and the present one is found on the way (Micikevicius et al., arXiv 2209.05433; Transformer
Engine's `delayed`). A step has one scale per tensor, for all microbatches and all ranks, and an amax that is the
maximum over all of them. So scales depend neither on the layout nor on the order of microbatches.

A history that has no entry yet says nothing about the size of values, and gradients are often smaller than any FP8
number. So the first step of a layer takes its products in the dtype of the parameters, and finds the first amaxes.

A tensor whose amax is zero, infinite or NaN in a step keeps its history, and so its scale. This is also so in a step
that is left out because of its gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron.config.fp8 import MAX, Fp8Config
from megatron.core.comm.collectives import all_reduce
from megatron.core.groups import Group
from megatron.kernels.ops.fp8.formats import FORMATS, largest
from megatron.kernels.ops.fp8.quantize import scale_of

KINDS = ("input", "weight", "gradient")  # of the tensors of a layer, in the order of its cells


class DelayedScales:
    """The histories of all FP8 layers of the model, the same on every rank, and the scales that follow from them.

    history [3 x layers, length]: amaxes of the last steps, newest first, 0 where there was no step. scales, amaxes
    [3 x layers]: of this step. All fp32.
    """

    def __init__(self, names: Sequence[str], config: Fp8Config, world: Group, device: torch.device) -> None:
        """names: of the FP8 layers of the whole model, in one order on all ranks."""
        assert config.fp8_format is not None
        formats = FORMATS[config.fp8_format]
        cells = len(KINDS) * len(names)
        self.history = torch.zeros(cells, config.fp8_amax_history_len, device=device)
        self._scales, self._amaxes = torch.ones(cells, device=device), torch.zeros(cells, device=device)
        of_layer = [largest(formats.forward), largest(formats.forward), largest(formats.gradient)]
        self._largest = torch.tensor(of_layer * len(names), device=device)
        self._places = {name: number * len(KINDS) for number, name in enumerate(names)}
        self._margin, self._takes_max, self._world = config.fp8_margin, config.fp8_amax_compute_algo == MAX, world

    def scales_of(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the scales of a layer's input, weight and gradient, views [1] that follow every step."""
        return self._cells(self._scales, name)

    def amaxes_of(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the cells [1] that take the largest values of a layer's input, weight and gradient in a step."""
        return self._cells(self._amaxes, name)

    def histories(self) -> dict[str, Tensor]:
        """Returns name -> history [3, length] of all layers: views."""
        return {name: self.history[place : place + len(KINDS)] for name, place in self._places.items()}

    def begin_step(self) -> None:
        """Forgets the largest values that an evaluation has found."""
        self._amaxes.zero_()

    def end_step(self) -> None:
        """Adds the largest values of a step to the histories, and sets the scales of the next one.

        The host does not wait. Communication: one max all-reduce of 3 numbers per layer over the world.
        """
        # NaN has no order; infinity wins every maximum.
        amaxes = torch.where(self._amaxes.isfinite(), self._amaxes, torch.inf)
        all_reduce(amaxes, self._world, "max")
        is_valid = (amaxes.isfinite() & (amaxes > 0)).unsqueeze(1)
        longer = torch.cat([amaxes.unsqueeze(1), self.history[:, :-1]], dim=1)
        self.history.copy_(torch.where(is_valid, longer, self.history))
        self._set_scales()

    def load(self, saved: Mapping[str, Tensor]) -> set[str]:
        """Takes the saved histories [3, any length] of layers of the model, and returns the layers that have none.

        A layer whose gradient is never wanted has the other two.
        """
        self.history.zero_()
        for name, history in self.histories().items():
            if name in saved:
                length = min(history.shape[1], saved[name].shape[1])
                history[:, :length] = saved[name][:, :length]
        self._set_scales()
        is_empty = (self.history[:, 0] == 0).tolist()
        return {name for name, place in self._places.items() if all(is_empty[place : place + len(KINDS)])}

    def _set_scales(self) -> None:
        amaxes = self.history.amax(1) if self._takes_max else self.history[:, 0]
        self._scales.copy_(scale_of(amaxes, self._largest, self._margin))

    def _cells(self, values: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        first, second, third = values[self._places[name] :][: len(KINDS)].split(1)
        return first, second, third
