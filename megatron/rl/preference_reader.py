"""The batches of a run that learns from preferences: pairs of answers, whose tokens are weighted by DPO's objective.

A step has three passes over its pairs, as [Note: two passes] of objectives.py explains: a forward under the current
weights, one under the reference's, and the training step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatron.core.comm.collectives import all_reduce
from megatron.rl.answers import PackedAnswers, pack, shares
from megatron.rl.forward import current_log_probabilities, with_weights
from megatron.rl.metrics import preference_sums
from megatron.rl.objectives import as_token_weights
from megatron.rl.preference_data import PreferencePair
from megatron.rl.preferences import PREFERENCE_LOSSES, PreferencePairs, preference_objective
from megatron.rl.prompts import PromptSet
from megatron.rl.reference import ReferenceWeights
from megatron.rl.report import LearningReport
from megatron.training.batch import Batch, BatchSource
from megatron.training.trainer import Trainer


class PreferenceReader(BatchSource):
    """Reads the pairs of the next step, and weighs the tokens of their answers. All ranks of the world read together.

    The pair at position n of `pairs` is sample n of the run, so a run that continues reads on where it stopped.
    """

    def __init__(
        self,
        trainer: Trainer,
        pairs: PromptSet[PreferencePair],
        reference: ReferenceWeights | None,
        held_out: PromptSet[PreferencePair] | None = None,
    ) -> None:
        """reference: the weights that the policy is compared with; None: all pairs know their log-probabilities.
        held_out: pairs for the evaluation."""
        config, self.held_out = trainer.run.rl, held_out
        self._trainer, self._pairs, self._reference = trainer, pairs, reference
        self._beta = config.dpo_beta
        self._objective = partial(
            preference_objective,
            preference_loss=PREFERENCE_LOSSES[config.dpo_loss_type],
            beta=config.dpo_beta,
            label_smoothing=config.dpo_label_smoothing,
            sft_coefficient=config.dpo_sft_coefficient,
        )
        self.reports: deque[LearningReport] = deque()  # for the log, which takes them

    def read(self, num_microbatches: int) -> list[Batch]:
        """Returns the microbatches of the next step, as many as its answers fill.

        Both answers of a pair are rows of their own replica, in any of its microbatches. Communication: that of two
        evaluations, or of one if the pairs know the reference, and a sum of a few numbers over dp.
        """
        state = self._trainer.state
        count = self._trainer.batches.global_batch_size(state.consumed_samples)
        packed, current, pairs = self._compared(self._pairs.batch(state.consumed_samples, count))
        value, weights = as_token_weights(partial(self._objective, pairs=pairs, total_pairs=count), current)
        self.reports.append(LearningReport(state.iteration, 1, self._figures(value, current, pairs)))
        return with_weights(packed.batches, weights)

    def evaluate(self) -> dict[str, float]:
        """Returns the loss and the means over the pairs that are held out, under the current weights.

        Communication: that of two evaluations and a sum of a few numbers over dp, for each global batch of pairs.
        """
        assert self.held_out is not None
        total, count = len(self.held_out), self._trainer.batches.final_global_batch_size
        numbers: dict[str, float] = {}
        for first in range(0, total, count):
            part = self.held_out.batch(first, min(count, total - first))
            _, current, pairs = self._compared(part)
            figures = self._figures(self._objective(current, pairs=pairs, total_pairs=len(part)), current, pairs)
            for name, value in figures.items():
                numbers[name] = numbers.get(name, 0.0) + value * len(part) / total
        return numbers

    def _compared(self, pairs: Sequence[PreferencePair]) -> tuple[PackedAnswers, Tensor, PreferencePairs]:
        """Returns this replica's rows of the answers, the log-probabilities of their tokens, and its pairs with those
        of the reference."""
        trainer = self._trainer
        run, dp = trainer.run, trainer.groups.dp
        assert run.train.micro_batch_size and run.data.seq_length
        replicas = [
            [answer for pair in share for answer in (pair.chosen, pair.rejected)] for share in shares(pairs, dp.size)
        ]
        packed = pack(
            replicas,
            dp.rank,
            seq_length=run.data.seq_length,
            micro_batch_size=run.train.micro_batch_size,
            device=trainer.device,
        )
        current = current_log_probabilities(trainer, packed.batches)
        if self._reference is None:
            stored = [values.tolist() for pair in shares(pairs, dp.size)[dp.rank] for values in pair.reference or ()]
            reference = packed.of_tokens(stored)
        else:
            with self._reference.in_place():
                reference = current_log_probabilities(trainer, packed.batches)
        numbers = torch.arange(packed.count, device=trainer.device)
        count = max(1, packed.count)  # a replica may have no pair in an evaluation
        compared = PreferencePairs(reference, packed.mask, packed.sequences, count, numbers[::2], numbers[1::2])
        return packed, current, compared

    def read_ahead(self, num_microbatches: int) -> None:
        """Does nothing: the weights of tokens depend on the step that is under way."""

    def close(self) -> None:
        """Does nothing: no process loads data."""

    def _figures(self, value: Tensor, log_probs: Tensor, pairs: PreferencePairs) -> dict[str, float]:
        """Returns the loss and the means over the pairs of the global batch."""
        sums = preference_sums(log_probs, pairs, self._beta)
        names = list(sums)
        loss, total, *rest = all_reduce(torch.stack([value, *sums.values()]), self._trainer.groups.dp).tolist()
        return {"loss": loss} | {name: number / total for name, number in zip(names[1:], rest, strict=True)}
