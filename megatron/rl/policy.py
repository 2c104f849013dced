"""The objective that the flags name, as weights of the tokens of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from megatron.config.rl import MASK, RLConfig
from megatron.core.comm.collectives import all_reduce
from megatron.core.groups import Group
from megatron.rl.advantages import ADVANTAGES
from megatron.rl.aggregation import Aggregation, aggregation_weights, local_counts
from megatron.rl.answers import Response
from megatron.rl.correction import Correction, icepop, reject, truncate
from megatron.rl.divergence import KL_ESTIMATORS
from megatron.rl.experience import Experience, Level
from megatron.rl.metrics import largest_difference, policy_sums
from megatron.rl.objectives import POLICY_LOSSES, ClipRange, as_token_weights, policy_objective


@dataclass(frozen=True)
class WeightedTokens:
    """weights: of the losses of tokens, fp32 in the shape of the experience's. numbers: means over the tokens of the
    global batch, by name."""

    weights: Tensor
    numbers: dict[str, float]


class Policy:
    """The objective of a run."""

    def __init__(self, config: RLConfig, dp: Group) -> None:
        """dp: the replicas that share a step."""
        self._config, self._dp = config, dp
        self._loss = POLICY_LOSSES[config.rl_objective]
        self._clip = ClipRange(config.grpo_clamp_eps_lower, config.grpo_clamp_eps_upper, config.eps_clip_c)
        self._divergence = KL_ESTIMATORS[config.kl_loss_type] if config.grpo_kl_beta else None

    def advantages(self, groups: Sequence[Sequence[Response]]) -> list[float]:
        """Returns the advantage of each answer, group after group."""
        if not groups:
            return []
        rewards = torch.tensor([[answer.reward for answer in group] for group in groups], dtype=torch.float64)
        values: list[float] = ADVANTAGES[self._config.advantage_estimator](rewards).flatten().tolist()
        return values

    def weigh(self, experience: Experience, log_probs: Tensor) -> WeightedTokens:
        """Returns the weights of the tokens under the current log-probabilities, in the experience's shape.

        Communication: two sums of a few numbers over dp.
        """
        config = self._config
        correction = self._correction(experience)
        # What is rejected counts nowhere, as if it had never been sampled.
        trained = experience if correction is None else dataclasses.replace(experience, mask=correction.mask)
        totals = all_reduce(local_counts(trained), self._dp)
        weights = aggregation_weights(
            trained, cast(Aggregation, config.rl_loss_aggregation), totals, config.rollout_max_response_len
        )
        objective = partial(
            policy_objective,
            experience=trained,
            policy_loss=self._loss,
            clip=self._clip,
            weights=weights,
            correction=None if correction is None else correction.weights,
            divergence=self._divergence,
            divergence_coefficient=config.grpo_kl_beta,
        )
        value, token_weights = as_token_weights(objective, log_probs)
        sums = policy_sums(log_probs, experience, self._loss, self._clip)
        if correction is not None:
            sums["rejected"] = (experience.mask - correction.mask).double().sum()
        names, values = list(sums), torch.stack([value.double(), *sums.values()])
        objective_value, tokens, *rest = all_reduce(values, self._dp).tolist()
        numbers = {name: total / max(tokens, 1) for name, total in zip(names[1:], rest, strict=True)}
        return WeightedTokens(token_weights, {"objective": objective_value, **numbers})

    def _correction(self, experience: Experience) -> Correction | None:
        """Returns the weights and the mask for a sampler with other probabilities; None where no flag asks for them."""
        config, correction = self._config, None
        if config.tis_clip is not None:
            level, low, high = cast(Level, config.tis_level), config.tis_clip_low, config.tis_clip
            masks = config.tis_mode == MASK
            correction = icepop(experience, level, low, high) if masks else truncate(experience, level, high, low)
        if config.rollout_rs is None:
            return correction
        assert config.rollout_rs_threshold is not None
        low, high = config.rollout_rs_threshold_lower or 1.0 / config.rollout_rs_threshold, config.rollout_rs_threshold
        rejected = reject(experience, cast(Level, config.rollout_rs), low, high)
        if correction is None:
            return rejected
        return Correction(correction.weights, correction.mask * rejected.mask)

    def largest_difference(self, experiences: Sequence[Experience]) -> float:
        """Returns the largest difference between log-probabilities of trainer and sampler, over all replicas.

        Communication: a maximum over dp.
        """
        largest = torch.stack([largest_difference(experience) for experience in experiences]).amax()
        return float(all_reduce(largest, self._dp, "max"))
