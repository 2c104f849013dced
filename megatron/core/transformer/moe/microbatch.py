"""The routing of a microbatch: made once, in the first forward, and data from then on.

Backward, the second run of recompute, the balance losses and the log read it. So recompute can neither choose other
experts nor count a token twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.core.comm.collectives import Handle, all_reduce_async
from megatron.core.groups import Group
from megatron.core.transformer.moe.balance import BalanceLosses, TokenCounts, prices, values


@dataclass
class LayerRouting:
    """The choice of one layer.

    chosen [T, k]: experts of each of this rank's tokens. accepted [T, k], bool: those whose expert takes the token;
    None where all do. plan: of the exchange of tokens. load [E], int64: assignments of this rank's tokens, which the
    bias of experts follows. counts [b, E], int64: those that the balance losses count, of this rank's tokens of each
    sample, and after `summed` is waited for, of whole samples. probabilities [b, E], squares [b]: for the values of the
    balance losses. margins [T]: of the choice, and capacity_margins [T, k]: of what the experts' capacity keeps,
    where they have one, negative for what it drops; both for a trace.
    """

    chosen: Tensor
    accepted: Tensor | None
    load: Tensor
    counts: Tensor
    summed: Handle | None
    probabilities: Tensor | None
    squares: Tensor | None
    margins: Tensor | None = None
    capacity_margins: Tensor | None = None
    plan: Any = None

    def whole_counts(self) -> Tensor:
        """`counts` of whole samples. Waits for their all-reduce."""
        if self.summed is not None:
            self.summed.wait()
            self.summed = None
        return self.counts


@dataclass
class MicrobatchRouting:
    """The tokens of a microbatch on this rank, and the choices of each layer for them.

    places [s]: the place in its sample of each of this rank's tokens; rows of all [s, b, ...] tensors are in this
    order. length: tokens of a whole sample; None in generation, where samples grow and experts have no capacity.
    routed [s, b], bool: False for padding, which no expert gets; None: there is none. tokens, losses, scale: of the
    balance losses, and the loss scale, fp64 []; losses is None in evaluation, which keeps and counts nothing. forced:
    number of a layer -> experts [T, k] to take instead of the router's choice. forced_accepted: number of a layer ->
    the assignments of this choice, bool [T, k], that the experts take whatever their capacity.
    is_traced: layers keep the margins of their choices, too. choices: number of a layer -> its experts [T, k] in int16,
    which a forward without backward fills in; None: they are not wanted.
    """

    places: Tensor
    length: int | None
    routed: Tensor | None
    tokens: TokenCounts | None = None
    losses: BalanceLosses | None = None
    scale: Tensor | float = 1.0
    forced: dict[int, Tensor] = field(default_factory=dict)
    forced_accepted: dict[int, Tensor] = field(default_factory=dict)
    is_traced: bool = False
    layers: dict[int, LayerRouting] = field(default_factory=dict)
    choices: dict[int, Tensor] | None = None

    def of_tokens(self, experts: Tensor) -> Tensor:
        """Returns the experts [b, length, k] of whole samples for this rank's tokens, [T, k]."""
        return experts[:, self.places.to(experts.device)].transpose(0, 1).flatten(0, 1)

    def record(
        self,
        number: int,
        chosen: Tensor,
        accepted: Tensor | None,
        load: Tensor,
        counts: Tensor,
        sums: tuple[Tensor, Tensor] | None,
        group: Group,
    ) -> LayerRouting:
        """Keeps the choice of layer `number`. load, counts (of this rank), and sums, probabilities and squares: see
        LayerRouting.

        Communication: with losses of whole samples an all-reduce of counts [b, E] over `group`, tp x cp, not waited
        for.
        """
        assert self.losses is not None
        summed = None
        if self.losses.counts_samples and group.size > 1:
            summed = all_reduce_async(counts, group)
        probabilities, squares = sums or (None, None)
        self.layers[number] = LayerRouting(chosen, accepted, load, counts, summed, probabilities, squares)
        return self.layers[number]

    def prices(self, number: int, previous: Tensor) -> Tensor:
        """Gradient [b, E] of the balance losses, times the loss scale, by the probabilities of a token."""
        assert self.losses is not None and self.tokens is not None
        gradient = prices(self.losses, self.layers[number].whole_counts(), previous, self.tokens)
        return gradient * self.scale

    def values(self, number: int, previous: Tensor) -> Tensor:
        """This rank's part of the losses of a layer; see `balance.values`."""
        layer = self.layers[number]
        assert self.losses is not None and self.tokens is not None
        counts = layer.whole_counts()
        if layer.probabilities is None or layer.squares is None:
            return torch.zeros(0, dtype=torch.float64, device=counts.device)
        return values(self.losses, counts, previous, self.tokens, layer.probabilities, layer.squares)
