"""DPO and its relatives: objectives of pairs of a chosen and a rejected response.

They are functions of log-probabilities as in [Note: two passes] of objectives.py, so the two responses of a pair may
lie in different microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron.rl.experience import sequence_lengths, sequence_sums


@dataclass(frozen=True, slots=True)
class PreferencePairs:
    """The pairs of a replica; tokens are in the shape of [Note: token layout] of experience.py.

    reference: fp32 log-probabilities of the reference model. mask: 1 on tokens of responses, else 0. sequences, int64:
    the number of the token's sequence, from 0 to count - 1. chosen, rejected [pairs], int64: numbers of the two
    sequences of a pair.
    """

    reference: Tensor
    mask: Tensor
    sequences: Tensor
    count: int
    chosen: Tensor
    rejected: Tensor

    def sums(self, values: Tensor) -> Tensor:
        """Returns the sum of values of tokens over each response, fp64 [count]."""
        return sequence_sums(values, self.mask, self.sequences, self.count)

    def lengths(self) -> Tensor:
        """Returns the number of tokens of each response, fp64 [count], at least 1."""
        return sequence_lengths(self.mask, self.sequences, self.count).clamp(min=1)


def sigmoid_loss(margin: Tensor, beta: float) -> Tensor:
    """Returns -log sigmoid(beta x margin) of each pair: DPO (arXiv 2305.18290)."""
    return -logsigmoid(beta * margin)


def ipo_loss(margin: Tensor, beta: float) -> Tensor:
    """Returns (margin - 1 / (2 beta))^2 of each pair: IPO (arXiv 2310.12036)."""
    return (margin - 1.0 / (2.0 * beta)).square()


class PreferenceLoss(NamedTuple):
    """A loss (margin, beta) -> loss of pairs, fp64 [pairs], and whether log-ratios are means over tokens, not sums."""

    loss: Callable[[Tensor, float], Tensor]
    is_length_normalized: bool


# The names are TRL's. Its IPO takes means per token, which are the paper's by its authors' word.
PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {
    "sigmoid": PreferenceLoss(sigmoid_loss, False),
    "sigmoid_norm": PreferenceLoss(sigmoid_loss, True),
    "ipo": PreferenceLoss(ipo_loss, True),
}


def preference_objective(
    log_probs: Tensor,
    pairs: PreferencePairs,
    preference_loss: PreferenceLoss,
    total_pairs: Tensor | int,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    sft_coefficient: float = 0.0,
) -> Tensor:
    """Returns this replica's part of the mean loss of the pairs of the global batch, fp64 [], to be minimised.

    The margin of a pair is h(chosen) - h(rejected) with the log-ratio h = sum over tokens of log p - reference, divided
    by the number of tokens where the loss is length-normalised. With label smoothing e the loss f becomes
    (1 - e) f(margin) + e f(-margin), the loss if a share e of labels is swapped (cDPO). sft_coefficient a adds
    -a x (mean of log p over the chosen response) to each pair: RPO's alpha (arXiv 2404.19733).

    total_pairs: the number of pairs in the global batch.
    """
    log_ratios = pairs.sums(log_probs - pairs.reference)
    if preference_loss.is_length_normalized:
        log_ratios = log_ratios / pairs.lengths()
    margins = log_ratios[pairs.chosen] - log_ratios[pairs.rejected]
    losses = preference_loss.loss(margins, beta)
    if label_smoothing:
        losses = (1.0 - label_smoothing) * losses + label_smoothing * preference_loss.loss(-margins, beta)
    if sft_coefficient:
        losses = losses - sft_coefficient * (pairs.sums(log_probs) / pairs.lengths())[pairs.chosen]
    return losses.sum() / total_pairs
