"""Rollouts: the policy answers prompts, the answers are rewarded, and all ranks get all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron.config.rl import RLConfig
from megatron.core.comm.collectives import gather_objects
from megatron.core.groups import Groups
from megatron.core.inference.engine.sampling import Sampling
from megatron.core.inference.generate import Completion
from megatron.rl.advantages import has_signal
from megatron.rl.answers import Response
from megatron.rl.prompts import Prompt
from megatron.rl.rewards import Reward, RewardBatch, RewardInput
from megatron.rl.routing import ExpertsByAnswer
from megatron.rl.sampler import AS_TRAINED, Sampler, sample_seed
from megatron.training.together import together


@dataclass(kw_only=True)
class Rollout:
    """Answers to the prompts of one update of the policy.

    groups: the answers to each prompt, in the order of the prompts. next_prompt: number of the first prompt that is not
    read. without_signal: groups whose answers have equal rewards, of all that were sampled. seconds: of each phase, on
    this rank. experts: of the answers that this rank has sampled, where the model has any.
    """

    groups: list[list[Response]]
    next_prompt: int
    without_signal: int = 0
    sampled: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    experts: ExpertsByAnswer = field(default_factory=dict)


class Rewards(Protocol):
    """What rewards answers."""

    def score(self, answers: Sequence[RewardInput]) -> RewardBatch:
        """Returns the rewards of the answers, in their order."""
        ...

    def close(self) -> None:
        """Ends its processes."""
        ...


class Rollouts:
    """Samples and rewards answers. Every rank of the world calls `run` and `answers` together."""

    def __init__(
        self,
        config: RLConfig,
        groups: Groups,
        sampler: Sampler,
        prompt_at: Callable[[int], Prompt],
        rewards: Rewards | None,
        seed: int,
    ) -> None:
        """prompt_at: the prompt with a number in the run. rewards: on the first rank of each replica, None on others.
        seed: of the run."""
        self._config, self._groups, self._sampler = config, groups, sampler
        self._prompt_at, self._rewards, self._seed = prompt_at, rewards, seed

    def run(self, first_prompt: int) -> Rollout:
        """Answers the prompts from this number on. Groups whose answers have equal rewards teach nothing; with
        --grpo-filter-groups-with-same-reward further prompts replace them.

        Communication: that of `answers`, in each round. Raises UserError, on all ranks.
        """
        config, rollout = self._config, Rollout(groups=[], next_prompt=first_prompt)
        for _ in range(config.rl_max_sampling_rounds if config.grpo_filter_groups_with_same_reward else 1):
            count = config.grpo_prompts_per_step - len(rollout.groups)
            numbers = range(rollout.next_prompt, rollout.next_prompt + count)
            sampled = self.answers(
                [(number, self._prompt_at(number)) for number in numbers],
                config.grpo_group_size,
                rollout.seconds,
                experts=rollout.experts,
            )
            rollout.next_prompt, rollout.sampled = numbers.stop, rollout.sampled + count
            rewards = torch.tensor([[answer.reward for answer in group] for group in sampled])
            informative = [
                group for group, differs in zip(sampled, has_signal(rewards).tolist(), strict=True) if differs
            ]
            rollout.without_signal += count - len(informative)
            rollout.groups += informative if config.grpo_filter_groups_with_same_reward else sampled
            if len(rollout.groups) == config.grpo_prompts_per_step:
                break
        # A step in which no group has a signal changes nothing, and shows in the log.
        rollout.groups = rollout.groups or sampled
        return rollout

    def answers(
        self,
        prompts: Sequence[tuple[int, Prompt]],
        group_size: int,
        seconds: dict[str, float],
        sampling: Sampling = AS_TRAINED,
        experts: ExpertsByAnswer | None = None,
    ) -> list[list[Response]]:
        """Returns `group_size` answers to each prompt, which is given with its number, on all ranks.

        The answers are shared out evenly to the replicas and to the ranks of cp. Adds the seconds of sampling and of
        rewards, and to `experts` those of the answers that this rank samples. Communication: that of the sampler, and a
        gather of all answers over the world.
        """
        requests = [(number, prompt, sample) for number, prompt in prompts for sample in range(group_size)]
        rank, replicas = self._groups.dp_cp.rank, self._groups.dp_cp.size
        requests = requests[rank * len(requests) // replicas : (rank + 1) * len(requests) // replicas]
        started = time.perf_counter()
        with self._groups.heartbeat.phase("sample"):
            completions = self._sampler.sample(
                [prompt.ids for _, prompt, _ in requests],
                [sample_seed(self._seed, number, sample) for number, _, sample in requests],
                sampling,
                records_experts=experts is not None,
            )
        for (number, _, sample), completion in zip(requests, completions, strict=True):
            if experts is not None and completion.experts is not None:
                experts[number, sample] = completion.experts
        sampled = time.perf_counter()
        with self._groups.heartbeat.phase("rewards"):
            answers = together(self._groups.world, lambda: self._rewarded(requests, completions))
        gathered = gather_objects(answers, self._groups.world)
        ended = time.perf_counter()
        seconds["sample"] = seconds.get("sample", 0.0) + sampled - started
        seconds["rewards"] = seconds.get("rewards", 0.0) + ended - sampled
        groups: dict[int, list[Response]] = {number: [] for number, _ in prompts}
        for answer in sorted((answer for part in gathered for answer in part), key=lambda answer: answer.number):
            groups[answer.prompt].append(answer)
        return list(groups.values())

    def prompt_of(self, group: Sequence[Response]) -> str:
        """Returns the text of the prompt that a group answers."""
        return self._prompt_at(group[0].prompt).text

    def close(self) -> None:
        """Ends the processes that reward answers."""
        if self._rewards is not None:
            self._rewards.close()

    def _rewarded(
        self, requests: Sequence[tuple[int, Prompt, int]], completions: Sequence[Completion]
    ) -> list[Response]:
        """Returns the answers of this replica on its first rank, and none on the others."""
        if self._rewards is None or not requests:
            return []
        inputs = [
            RewardInput(prompt.text, completion.text, prompt.label, prompt.row, tuple(completion.ids), prompt.messages)
            for (_, prompt, _), completion in zip(requests, completions, strict=True)
        ]
        rewards = self._rewards.score(inputs).rewards
        return [
            _answer(request, completion, reward, self._groups.dp_cp.rank)
            for request, completion, reward in zip(requests, completions, rewards, strict=True)
        ]


def _answer(request: tuple[int, Prompt, int], completion: Completion, reward: Reward, rank: int) -> Response:
    number, prompt, sample = request
    return Response(
        prompt=number,
        number=sample,
        prompt_ids=tuple(prompt.ids),
        ids=tuple(completion.ids),
        logprobs=completion.logprobs,
        sampler_rank=rank,
        text=completion.text,
        is_cut=completion.reason == "length",
        reward=reward.score,
        failure=reward.failure or "",
        numbers=dict(reward.figures),
    )
