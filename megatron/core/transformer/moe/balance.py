"""Losses that keep the load of experts balanced, and the router's logits small.

[Note: balance losses]
For a token t with probabilities p_t over the E experts (softmax of the logits, or their sigmoids divided by their sum),
a loss is the sum over tokens of  w_t E sum_i f_i p_ti, where f_i is the fraction of assignments that went to expert i.
With equal load it is 1. The kinds differ in the tokens that f counts, and so in w:

    seq_aux_loss     the tokens of t's sample (DeepSeek-V2, arXiv 2405.04434)   w = 1 / (samples x tokens of the sample)
    aux_loss         those of its microbatch (Switch, arXiv 2101.03961)         w = its share of samples / its tokens
    global_aux_loss  those of the global batch before (arXiv 2501.11873)        w = 1 / tokens of the batch
    z-loss           (ST-MoE, arXiv 2202.08906): sum of w logsumexp(logits)^2   w = 1 / tokens of the batch

Samples are those of the global batch, and tokens those of whole sequences, so no value depends on the layout.
Megatron-LM's global_aux_loss counts the microbatches of this step so far, which would depend on it, and is divided by
the number of replicas twice. f has no gradient. Of aux_loss and seq_aux_loss it counts the k highest scores, without
bias and groups, as in Megatron-LM; of global_aux_loss the choices in use. Neither leaves out what an expert's capacity
drops, except that global_aux_loss counts the load that a bias of experts follows, where there is one.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.config.moe_training import AUX, GLOBAL_AUX, NONE, SEQ_AUX, SINKHORN, MoEConfig


@dataclass(frozen=True)
class BalanceLosses:
    """The losses of a run: (kind, coefficient) of each balance loss, and the coefficient of the z-loss."""

    kinds: tuple[tuple[str, float], ...]
    z: float

    @classmethod
    def of(cls, moe: MoEConfig) -> BalanceLosses:
        """Returns the losses that the flags ask for."""
        pairs = zip(moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff, strict=True)
        return cls(
            tuple((kind, coefficient) for kind, coefficient in pairs if kind not in (NONE, SINKHORN) and coefficient),
            moe.moe_z_loss_coeff or 0.0,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the numbers in `values`, in order."""
        return (*(kind for kind, _ in self.kinds), *(("z_loss",) if self.z else ()))

    @property
    def counts_samples(self) -> bool:
        """Whether some loss needs the load of whole samples, which are sharded over tp and cp."""
        return any(kind in (AUX, SEQ_AUX) for kind, _ in self.kinds)


@dataclass(frozen=True)
class TokenCounts:
    """Tokens that are routed: of each sample of this microbatch [b], int64, and of the global batch, a number. samples:
    of the global batch. Whole sequences count, whatever part of them this rank holds. weights: those of `weights`, by
    kind, as soon as a layer has computed them."""

    by_sample: Tensor
    total: Tensor
    samples: int
    weights: dict[str, Tensor] = field(default_factory=dict, compare=False)


def weights(kind: str, tokens: TokenCounts) -> Tensor:
    """w of [Note: balance losses] for a token of each sample of the microbatch: [b], fp32.
    Computed once for all layers."""
    if kind not in tokens.weights:
        tokens.weights[kind] = _weights(kind, tokens)
    return tokens.weights[kind]


def _weights(kind: str, tokens: TokenCounts) -> Tensor:
    of_sample = tokens.by_sample.clamp(min=1)
    if kind == SEQ_AUX:
        return 1.0 / (tokens.samples * of_sample)
    if kind == AUX:
        return (len(of_sample) / tokens.samples / tokens.by_sample.sum().clamp(min=1)).expand(len(of_sample))
    return (1.0 / tokens.total.clamp(min=1)).expand(len(of_sample))


def fractions(kind: str, counts: Tensor, previous: Tensor) -> Tensor:
    """f of [Note: balance losses]: [b, E], fp32. counts [b, E]: assignments of each whole sample; previous [E]: those
    of the global batch before, all zero if there was none, which stands for equal load."""
    if kind == SEQ_AUX:
        used = counts
    elif kind == AUX:
        used = counts.sum(0, keepdim=True).expand_as(counts)
    else:
        used = (previous + (previous.sum() == 0)).expand_as(counts)
    return used / used.sum(1, keepdim=True).clamp(min=1)


def prices(losses: BalanceLosses, counts: Tensor, previous: Tensor, tokens: TokenCounts) -> Tensor:
    """Gradient of all balance losses (at least one) with respect to the probabilities of a token of each sample:
    [b, E], fp32."""
    terms = (
        coefficient * counts.shape[1] * weights(kind, tokens).unsqueeze(1) * fractions(kind, counts, previous)
        for kind, coefficient in losses.kinds
    )
    return functools.reduce(operator.add, terms)


def values(
    losses: BalanceLosses, counts: Tensor, previous: Tensor, tokens: TokenCounts, probabilities: Tensor, squares: Tensor
) -> Tensor:
    """This rank's part of each loss without its coefficient, in the order of `BalanceLosses.names`, fp64.

    probabilities [b, E], squares [b]: sums of p and of logsumexp^2 over this rank's tokens of each sample.
    """
    terms = []
    for kind, _ in losses.kinds:
        products = (fractions(kind, counts, previous).double() * probabilities.double()).sum(1)
        terms.append(counts.shape[1] * (weights(kind, tokens) * products).sum())
    if losses.z:
        terms.append((weights(GLOBAL_AUX, tokens) * squares.double()).sum())
    return torch.stack(terms) if terms else torch.zeros(0, dtype=torch.float64, device=counts.device)
