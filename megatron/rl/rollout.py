"""Rollouts: the policy answers prompts, the answers are rewarded, and all ranks get all of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron.config.rl import RLConfig
from megatron.core.comm.collectives import gather_objects
from megatron.core.groups import Groups
from megatron.core.inference.engine.sampling import Sampling
from megatron.core.inference.generate import Completion
from megatron.rl.advantages import has_signal, overlong_penalty
from megatron.rl.answers import Response
from megatron.rl.episodes import EnvironmentTurn, Episode, TurnEncoder
from megatron.rl.external_sampler import ExternalSampler
from megatron.rl.function_workers import CallResult
from megatron.rl.prompts import Prompt
from megatron.rl.reward_model import RewardModel
from megatron.rl.rewards import Reward, RewardBatch
from megatron.rl.routing import ExpertsByAnswer
from megatron.rl.sampler import AS_TRAINED, sample_seed
from megatron.rl.user_functions import AnsweredPrompt
from megatron.training.together import together


@dataclass(kw_only=True)
class Rollout:
    """Answers to the prompts of one update of the policy.

    groups: the answers to each prompt, in the order of the prompts. next_prompt: number of the first prompt that is not
    read. without_signal: groups whose answers have equal rewards, of all that were sampled. staleness: optimizer steps
    between the weights that gave the first of the answers and those that train on them. seconds: of each phase, on this
    rank. experts: of the answers that this rank has sampled, where the model has any.
    """

    groups: list[list[Response]]
    next_prompt: int
    without_signal: int = 0
    sampled: int = 0
    staleness: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    experts: ExpertsByAnswer = field(default_factory=dict)


class AnswerSource(Protocol):
    """What answers prompts: `Sampler` or `ExternalSampler`. All ranks of the world call it together."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        max_new_tokens: Sequence[int],
        sampling: Sampling = AS_TRAINED,
        *,
        records_experts: bool = False,
    ) -> list[Completion]:
        """Returns an answer to each prompt, with the log-probabilities of its tokens, and if it is asked for and the
        source knows them, with the experts of all tokens that were read."""
        ...

    @property
    def staleness(self) -> int:
        """Optimizer steps between the weights that gave the last answers and those of the trainer."""
        ...

    def close(self) -> None:
        """Ends its processes."""
        ...


class Rewards(Protocol):
    """What rewards answers."""

    def score(self, answers: Sequence[AnsweredPrompt]) -> RewardBatch:
        """Returns the rewards of the answers, in their order."""
        ...

    def close(self) -> None:
        """Ends its processes."""
        ...


class Environment(Protocol):
    """What continues conversations behind an answer. FunctionPool is one."""

    def call(self, answers: Sequence[AnsweredPrompt]) -> list[CallResult]:
        """Returns the turn behind each conversation, as `EnvironmentFunction` does."""
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
        sampler: AnswerSource,
        prompt_at: Callable[[int], Prompt],
        rewards: Rewards | None,
        seed: int,
        environment: Environment | None = None,
        turn_encoder: TurnEncoder | None = None,
        reward_model: RewardModel | None = None,
    ) -> None:
        """prompt_at: the prompt with a number in the run. rewards, environment: on the first rank of each replica, None
        on others, and on all ranks without a function; answers that no function rewards have the reward 0.
        turn_encoder: of the environment's turns, on all ranks. seed: of the run. reward_model: whose scores are
        added."""
        self._config, self._groups, self._sampler = config, groups, sampler
        self._prompt_at, self._rewards, self._seed = prompt_at, rewards, seed
        self._environment, self._turn_encoder = environment, turn_encoder
        self._reward_model = reward_model
        self.staleness = 0  # of the first answers that were sampled last

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
            sampled = [with_penalties(group, config) for group in sampled]
            rollout.next_prompt, rollout.sampled = numbers.stop, rollout.sampled + count
            rollout.staleness = max(rollout.staleness, self.staleness)
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

        The answers are shared out evenly to the replicas and to the ranks of cp. Adds the seconds of sampling, of the
        environment and of rewards, and to `experts` those of the answers that this rank samples. Communication: that of
        the sampler in each turn and of the reward model, and a gather of all answers over the world; with an environment
        also gathers of its turns over tp x pp, and of a flag over the world.
        """
        episodes = self._episodes(prompts, group_size)
        with _seconds(seconds, "sample"):
            self._sample(episodes, 0, sampling, records_experts=experts is not None)
        self.staleness = self._sampler.staleness
        if self._turn_encoder is not None:
            self._go_on(episodes, self._turn_encoder, sampling, seconds, records_experts=experts is not None)
        for episode in episodes:
            if experts is not None and episode.experts is not None:
                experts[episode.prompt_number, episode.number] = episode.experts
        with _seconds(seconds, "rewards"):
            with self._groups.heartbeat.phase("rewards"):
                answers = together(self._groups.world, lambda: self._rewarded(episodes))
            gathered = gather_objects(answers, self._groups.world)
            groups: dict[int, list[Response]] = {number: [] for number, _ in prompts}
            for answer in sorted((answer for part in gathered for answer in part), key=lambda answer: answer.number):
                groups[answer.prompt].append(answer)
            if self._reward_model is None:
                return list(groups.values())
            return self._with_scores(prompts, list(groups.values()), self._reward_model)

    def _with_scores(
        self, prompts: Sequence[tuple[int, Prompt]], groups: Sequence[list[Response]], model: RewardModel
    ) -> list[list[Response]]:
        """Returns the answers to the prompts with the scores of the model in their rewards."""
        coefficient = self._config.reward_model_coef
        pairs = [(prompt, answer.text) for (_, prompt), group in zip(prompts, groups, strict=True) for answer in group]
        scores = iter(model.scores([prompt for prompt, _ in pairs], [text for _, text in pairs]))
        return [[with_score(answer, next(scores), coefficient) for answer in group] for group in groups]

    def prompt_of(self, group: Sequence[Response]) -> str:
        """Returns the text of the prompt that a group answers."""
        return self._prompt_at(group[0].prompt).text

    def close(self) -> None:
        """Ends the processes that sample and reward answers, and continue conversations."""
        for processes in (self._rewards, self._environment, self._sampler):
            if processes is not None:
                processes.close()

    def begin(self, first_prompt: int) -> None:
        """Begins to sample the first answers that `run` will be called for, with the weights as they are.

        Communication: that of the sampler.
        """
        assert isinstance(self._sampler, ExternalSampler), "the flags refuse it for the model itself"
        config = self._config
        numbers = range(first_prompt, first_prompt + config.grpo_prompts_per_step)
        prompts = [(number, self._prompt_at(number)) for number in numbers]
        self._sampler.begin(*self._arguments(self._episodes(prompts, config.grpo_group_size), 0))

    def _episodes(self, prompts: Sequence[tuple[int, Prompt]], group_size: int) -> list[Episode]:
        """Returns this replica's share of the episodes of a rollout."""
        episodes = [
            Episode(prompt_number=number, number=sample, prompt=prompt)
            for number, prompt in prompts
            for sample in range(group_size)
        ]
        rank, replicas = self._groups.dp_cp.rank, self._groups.dp_cp.size
        return episodes[rank * len(episodes) // replicas : (rank + 1) * len(episodes) // replicas]

    def _arguments(self, episodes: Sequence[Episode], turn: int) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
        """Returns the prompts, seeds and longest lengths of the next answers, behind `turn` others."""
        room = self._config.rollout_max_response_len
        assert room is not None
        return (
            [episode.context for episode in episodes],
            [sample_seed(self._seed, episode.prompt_number, episode.number, turn) for episode in episodes],
            [room - len(episode.ids) for episode in episodes],
        )

    def _sample(self, episodes: Sequence[Episode], turn: int, sampling: Sampling, *, records_experts: bool) -> None:
        """Adds an answer to each episode, behind `turn` answers."""
        with self._groups.heartbeat.phase("sample"):
            completions = self._sampler.sample(
                *self._arguments(episodes, turn), sampling, records_experts=records_experts
            )
        for episode, completion in zip(episodes, completions, strict=True):
            episode.add_answer(completion)

    def _go_on(
        self,
        episodes: Sequence[Episode],
        encoder: TurnEncoder,
        sampling: Sampling,
        seconds: dict[str, float],
        *,
        records_experts: bool,
    ) -> None:
        """Adds turns of the environment and answers to them, until all episodes of all replicas are over."""
        for turn in range(1, self._config.rl_max_turns):
            with _seconds(seconds, "environment"), self._groups.heartbeat.phase("environment"):
                self._add_turns([episode for episode in episodes if not episode.is_over], encoder)
            unfinished = [episode for episode in episodes if not episode.is_over]
            if not any(gather_objects(bool(unfinished), self._groups.world)):
                return
            with _seconds(seconds, "sample"):
                self._sample(unfinished, turn, sampling, records_experts=records_experts)

    def _add_turns(self, episodes: Sequence[Episode], encoder: TurnEncoder) -> None:
        """Adds a turn of the environment to each episode, or ends it."""
        room = self._config.rollout_max_response_len
        assert room is not None

        def turns() -> list[EnvironmentTurn | CallResult]:
            if self._environment is None or not episodes:
                return []
            results = self._environment.call([episode.answered() for episode in episodes])
            return [
                result if result.value is None else encoder.encode(episode, result.value)
                for episode, result in zip(episodes, results, strict=True)
            ]

        written = gather_objects(together(self._groups.world, turns), self._groups.model)[0]
        for episode, turn in zip(episodes, written, strict=True):
            if isinstance(turn, EnvironmentTurn):
                episode.add_turn(turn, room)
            else:
                episode.failure, episode.is_over = turn.failure, True

    def _rewarded(self, episodes: Sequence[Episode]) -> list[Response]:
        """Returns the answers of this replica on its first rank, and none on the others."""
        if self._groups.model.rank or not episodes:
            return []
        complete = [episode for episode in episodes if episode.failure is None]
        rewards = (Reward(0.0),) * len(complete)
        if self._rewards is not None:
            rewards = tuple(self._rewards.score([episode.answered() for episode in complete]).rewards)
        scores, rank = iter(rewards), self._groups.dp_cp.rank
        return [
            _response(episode, next(scores) if episode.failure is None else self._replaced(episode), rank)
            for episode in episodes
        ]

    def _replaced(self, episode: Episode) -> Reward:
        """Returns the reward of an episode in which the environment has failed."""
        assert self._config.rm_on_error is not None, "a failure without a replacement raises"
        return Reward(self._config.rm_on_error, failure=episode.failure)


def with_score(answer: Response, score: float, coefficient: float) -> Response:
    """Returns the answer with the score of a reward model, times its coefficient, in its reward."""
    numbers = answer.numbers | {"model score": score}
    return dataclasses.replace(answer, reward=answer.reward + coefficient * score, numbers=numbers)


def with_penalties(answers: Sequence[Response], config: RLConfig) -> list[Response]:
    """Returns the answers with rewards that are lowered where they are long, as --overlong-buffer-len says."""
    buffer, longest = config.overlong_buffer_len, config.rollout_max_response_len
    if buffer is None:
        return list(answers)
    assert longest is not None
    lengths = torch.tensor([len(answer.ids) for answer in answers])
    penalties = (overlong_penalty(lengths, longest, buffer) * config.overlong_penalty_factor).tolist()
    return [
        dataclasses.replace(
            answer, reward=answer.reward + penalty, numbers=answer.numbers | {"overlong penalty": penalty}
        )
        for answer, penalty in zip(answers, penalties, strict=True)
    ]


@contextmanager
def _seconds(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the time of the body to a phase."""
    started = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - started


def _response(episode: Episode, reward: Reward, rank: int) -> Response:
    return Response(
        prompt=episode.prompt_number,
        number=episode.number,
        prompt_ids=tuple(episode.prompt.ids),
        ids=tuple(episode.ids),
        mask=() if all(episode.mask) else tuple(episode.mask),
        logprobs=tuple(episode.logprobs),
        sampler_rank=rank,
        text=episode.text,
        is_cut=episode.is_cut,
        reward=reward.score,
        failure=reward.failure or "",
        numbers=dict(reward.figures),
        turns=episode.answer_count,
    )
