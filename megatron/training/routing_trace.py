"""Records which experts the tokens of a run go to, and forces the choices of another run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron.core.transformer.moe.microbatch import MicrobatchRouting
from megatron.training.batch import Batch

# (step, digest of the sample's tokens, layer) -> experts of its tokens [s, k], int64; -1 for tokens of other ranks.
ExpertChoices = dict[tuple[int, str, int], Tensor]


class RoutingTrace:
    """The choices of the tokens that this rank holds, by step, sample and layer, whatever the layout.

    Replaying the choices of a sampler in training, and comparing layouts, need both halves: `choices` of one run are
    the `forced` of another.
    """

    def __init__(
        self,
        forced: Mapping[tuple[int, str, int], Tensor] | None = None,
        first_step: int = 0,
        forced_capacity: Mapping[tuple[int, str, int], Tensor] | None = None,
    ) -> None:
        """first_step: the number of the first step, that of a run that continues. forced_capacity: `capacity_margins`
        of the run whose choices are forced; experts then take the same tokens here."""
        self.choices: ExpertChoices = {}
        self.margins: ExpertChoices = {}  # of each choice [s], fp32, see kernels.ops.routing.margins
        # Of each assignment [s, k], fp32, in layers with a capacity, see kernels.ops.routing.capacity_margins; negative
        # where the expert does not take the token.
        self.capacity_margins: ExpertChoices = {}
        self._forced, self._step = forced, first_step - 1
        self._forced_capacity = forced_capacity or {}
        self._samples: dict[int, list[str]] = {}  # of each microbatch, by the identity of its routing

    def begin_step(self, batches: Sequence[Batch], routings: Sequence[MicrobatchRouting]) -> None:
        """Call with the microbatches of a step, whose routings have no choices yet."""
        self._step += 1
        self._samples.clear()
        for batch, routing in zip(batches, routings, strict=True):
            self._samples[id(routing)] = [
                hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in batch.tokens.cpu()
            ]
            routing.is_traced = True
            if self._forced is not None:
                self._force(routing)

    def record(self, routing: MicrobatchRouting, layer: int) -> None:
        """Call when a layer has chosen, and before the choice is freed."""
        samples = self._samples[id(routing)]
        chosen = routing.layers[layer].chosen.view(len(routing.places), len(samples), -1).cpu()
        places, routed = routing.places.cpu(), None if routing.routed is None else routing.routed.cpu()
        length = routing.length
        assert length is not None
        for number, sample in enumerate(samples):
            whole = self.choices.setdefault(
                (self._step, sample, layer), torch.full((length, chosen.shape[-1]), -1, dtype=torch.int64)
            )
            held = slice(None) if routed is None else routed[:, number]
            whole[places[held]] = chosen[held, number]
            of_layer = routing.layers[layer].margins
            assert of_layer is not None
            margins = self.margins.setdefault((self._step, sample, layer), torch.full((length,), math.inf))
            margins[places[held]] = of_layer.view(len(places), len(samples))[held, number].float().cpu()
            of_capacity = routing.layers[layer].capacity_margins
            if of_capacity is not None:
                margins = self.capacity_margins.setdefault(
                    (self._step, sample, layer), torch.full((length, chosen.shape[-1]), math.inf)
                )
                margins[places[held]] = of_capacity.view(len(places), len(samples), -1).cpu()[held, number]

    def _force(self, routing: MicrobatchRouting) -> None:
        assert self._forced is not None
        samples = self._samples[id(routing)]
        for step, sample, layer in self._forced:
            if step == self._step and sample == samples[0]:
                choices = torch.stack([self._forced[step, other, layer] for other in samples])
                routing.forced[layer] = routing.of_tokens(choices.clamp(min=0)).to(routing.places.device)
                if (step, sample, layer) in self._forced_capacity:
                    margins = torch.stack([self._forced_capacity[step, other, layer] for other in samples])
                    routing.forced_accepted[layer] = routing.of_tokens(margins > 0).to(routing.places.device)
