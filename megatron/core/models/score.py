"""The decoder with one value in place of its head: what transformers calls sequence classification with one label."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import linear

from megatron.core.comm.collectives import all_gather
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.context import Build
from megatron.schedule.partition import Stage


class ScoreModel(GPTModel):
    """tokens [b, s] -> less the score of the sequence up to each token [b, s], where a GPTModel has the token's loss.

    So it runs in the same program, and log-probabilities of labels become scores. It is not trained.
    """

    def __init__(self, build: Build, stages: Sequence[Stage], weight: Tensor) -> None:
        """weight: of the score, [1, h], on every rank. The configuration of `build` ties the head to the embedding, so
        that there are no weights of a head."""
        assert build.spec.tied, "the head would have weights of its own"
        super().__init__(build, stages)
        self.output_layer = None
        if not any(stage.embedding for stage in stages):
            self.embedding = None
        self.register_buffer("score", weight.to(build.device, build.dtype))

    def _losses(self, hidden: Tensor, targets: Tensor, *, in_backward: bool) -> Tensor:
        """Hidden states of the last stage [s or s/tp, b, h] -> less the scores, fp32 [s, b]."""
        scores = linear(hidden, self.get_buffer("score")).squeeze(-1).float()
        return -(all_gather(scores, self._build.groups.tp) if self._build.sequence_parallel else scores)
