"""Computes rewards in worker processes."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.rl.function_workers import CallResult, FunctionPool
from megatron.rl.rewards import Reward, RewardBatch
from megatron.rl.user_functions import AnsweredPrompt


class RewardPool(FunctionPool):
    """Worker processes that compute rewards."""

    def score(self, answers: Sequence[AnsweredPrompt]) -> RewardBatch:
        """Returns the rewards of the answers, in their order. See `call` for functions that fail."""
        return RewardBatch(tuple(self._reward(result) for result in self.call(answers)))

    def _reward(self, result: CallResult) -> Reward:
        if result.failure is None:
            return Reward(result.value["score"], result.value["figures"])
        assert self.replacement is not None, "a failure without a replacement raises"
        return Reward(self.replacement, failure=result.failure)
