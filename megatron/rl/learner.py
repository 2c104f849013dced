"""The batches of a run that learns from rewards: rollouts, cut into steps, whose tokens are weighted by the objective.

[Note: two passes] The objective is a function of the log-probabilities of the sampled tokens alone. A forward without
gradients computes them, and the derivative of the objective by each is the weight of that token's loss in an ordinary
training step. So objectives of tokens and of whole answers work under every layout, and no backward knows of them. The
first step after a rollout uses the log-probabilities that the old policy has anyway; each further one costs a forward.

[Note: log-probabilities of the sampler] In batch-invariant mode the sampler's are those that this forward would
compute, bit for bit. --use-rollout-logprobs leaves it out, but for the first rollout of a run and every
--rollout-logprobs-interval-th one, in which both are compared. A difference, which a feature of training may make that
sampling does not have, brings it back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.base.log import get_logger
from megatron.core.comm.collectives import all_reduce
from megatron.rl.advantages import distillation_advantages
from megatron.rl.answers import PackedAnswers, Response, pack, shares
from megatron.rl.experience import Experience
from megatron.rl.forward import current_log_probabilities, routings_with_choices, with_weights
from megatron.rl.frozen_model import FrozenModel
from megatron.rl.policy import Policy
from megatron.rl.prompts import Prompt, PromptSet
from megatron.rl.reference import ReferenceWeights
from megatron.rl.report import LearningReport
from megatron.rl.rollout import Rollout, Rollouts
from megatron.rl.routing import ExpertRecord, exchange_experts, expert_layers
from megatron.training.batch import Batch, BatchSource
from megatron.training.trainer import Trainer

log = get_logger(__name__)


@dataclass(frozen=True)
class PolicyStep:
    """One optimizer step of this replica on answers: its microbatches [b, s], and their tokens [rows, s].

    is_compared: whether the trainer has computed the old log-probabilities; else they are the sampler's.
    """

    batches: list[Batch]
    experience: Experience
    is_compared: bool


@dataclass
class RolloutReport(LearningReport):
    """A rollout with the figures of the steps on its answers."""

    rollout: Rollout


class RolloutReader(BatchSource):
    """Reads the microbatches of a step, and samples new answers when all steps on the last ones are done.

    All ranks of the world read together.
    """

    def __init__(
        self,
        trainer: Trainer,
        rollouts: Rollouts,
        policy: Policy,
        reference: ReferenceWeights | None,
        held_out: PromptSet[Prompt] | None,
        teacher: FrozenModel | None = None,
    ) -> None:
        """reference: needed where the objective has a divergence from it. held_out: prompts for the evaluation.
        teacher: of on-policy distillation."""
        self.rollouts, self.held_out = rollouts, held_out
        self._trainer, self._policy, self._reference, self._teacher = trainer, policy, reference, teacher
        self._steps: deque[PolicyStep] = deque()
        self._is_on_policy = False  # whether the weights are those of the last rollout
        self._flips = torch.zeros(2)  # see ExpertRecord.flips
        self._reads_sampler = trainer.run.rl.use_rollout_logprobs  # see [Note: log-probabilities of the sampler]
        self._rollouts_since = 0  # the last one whose log-probabilities were compared
        self.reports: deque[RolloutReport] = deque()  # for the log, which takes them

    def read(self, num_microbatches: int) -> list[Batch]:
        """Returns the microbatches of the next step, as many as its answers fill.

        Communication: if new answers are due that of `Rollouts.run` and of one evaluation, and of one more for a
        reference and for a teacher; in each further step on the same answers that of one evaluation; sums of a few
        numbers over dp.
        """
        if not self._steps:
            self._begin()
        step = self._steps.popleft()
        experience = step.experience
        current = experience.old if self._is_on_policy else current_log_probabilities(self._trainer, step.batches)
        self._is_on_policy = False
        weighted = self._policy.weigh(experience, current)
        numbers = dict(weighted.numbers)
        if not step.is_compared:
            del numbers["sampler-k3"]
        self.reports[-1].numbers |= numbers
        return with_weights(step.batches, weighted.weights)

    def read_ahead(self, num_microbatches: int) -> None:
        """Does nothing: the next answers depend on the step that is under way."""

    def close(self) -> None:
        """Ends the processes that reward answers."""
        self.rollouts.close()

    def _begin(self) -> None:
        """Samples, rewards and packs the answers of the next steps."""
        trainer = self._trainer
        rollout = self.rollouts.run(trainer.state.consumed_prompts)
        trainer.state.consumed_prompts = rollout.next_prompt
        steps_per_rollout = self._steps_of_a_pass * trainer.run.rl.grpo_iterations
        if trainer.run.rl.rl_generation_lag and trainer.state.iteration + steps_per_rollout < trainer.total_iterations:
            self.rollouts.begin(rollout.next_prompt)
        started = time.perf_counter()
        self._flips = torch.zeros(2, dtype=torch.float64, device=trainer.device)
        compares = not self._reads_sampler or self._rollouts_since == 0
        steps = [self._with_log_probabilities(*step, compares=compares) for step in self._packed_steps(rollout)]
        rollout.seconds["log-probabilities"] = time.perf_counter() - started
        self._steps.extend(steps * trainer.run.rl.grpo_iterations)
        self._is_on_policy = True
        rollout.experts.clear()
        numbers = rollout_numbers(rollout)
        if trainer.run.rl.rl_generation_lag:
            numbers["staleness"] = rollout.staleness
        if compares:
            numbers |= self._differences(steps)
        self._rollouts_since = (self._rollouts_since + 1) % trainer.run.rl.rollout_logprobs_interval
        self.reports.append(RolloutReport(trainer.state.iteration, len(self._steps), numbers, rollout))

    def _differences(self, steps: Sequence[PolicyStep]) -> dict[str, float]:
        """Returns the figures of a comparison of sampler and trainer. Communication: of two numbers over the world for
        a model with experts, and a maximum over dp."""
        numbers, trainer = dict[str, float](), self._trainer
        if any(trainer.model.layers_with_experts) and trainer.run.rl.rl_external_sampler is None:
            flips, assignments = all_reduce(self._flips, trainer.groups.world).tolist()
            numbers["routing flips"] = flips / max(1, assignments)
        largest = self._policy.largest_difference([step.experience for step in steps])
        if self._reads_sampler and largest > 0:
            self._reads_sampler = False
            log.warning(
                "--use-rollout-logprobs: log-probabilities of sampler and trainer differ by %g, so the trainer "
                "computes them from now on",
                largest,
            )
        return numbers | {"largest difference": largest}

    @property
    def _steps_of_a_pass(self) -> int:
        """Optimizer steps of one pass over the answers of a rollout."""
        return self._trainer.run.rl.answers_per_rollout // self._trainer.batches.final_global_batch_size

    def _packed_steps(
        self, rollout: Rollout
    ) -> Iterator[tuple[Sequence[list[Response]], PackedAnswers, ExpertRecord | None]]:
        """Yields this replica's groups in the steps of one pass over all groups, in their order, with the experts that
        the sampler has chosen, where the model has any.

        A step has the same answers for every number of replicas, of which each gets whole groups.
        """
        trainer, dp = self._trainer, self._trainer.groups.dp
        run = trainer.run
        assert run.train.micro_batch_size and run.data.seq_length
        layers = expert_layers(trainer.model, trainer.groups)
        for part in shares(rollout.groups, self._steps_of_a_pass):
            replicas = shares(part, dp.size)
            answers = [[answer for group in share for answer in group] for share in replicas]
            packed = pack(
                answers,
                dp.rank,
                seq_length=run.data.seq_length,
                micro_batch_size=run.train.micro_batch_size,
                device=trainer.device,
            )
            recorded = None
            if layers and run.rl.rl_external_sampler is None:
                shape = len(layers), run.model.moe_router_topk
                experts = exchange_experts(rollout.experts, answers, trainer.groups, shape, trainer.device)
                recorded = ExpertRecord.of(packed, experts, layers)
            yield replicas[dp.rank], packed, recorded

    def _with_log_probabilities(
        self,
        groups: Sequence[list[Response]],
        packed: PackedAnswers,
        recorded: ExpertRecord | None,
        *,
        compares: bool,
    ) -> PolicyStep:
        """Returns a step with log-probabilities of the policy that has answered, and of the reference and the teacher
        where there are such models.

        See [Note: routing replay]. compares: the trainer computes them; else they are the sampler's.
        """
        trainer, batches, reference = self._trainer, packed.batches, None
        if recorded is not None and trainer.run.rl.moe_enable_routing_replay:
            batches = recorded.with_experts(batches)
        sampler = old = packed.of_tokens([answer.logprobs for group in groups for answer in group])
        if compares:
            routings = None if recorded is None else routings_with_choices(trainer, batches)
            old = current_log_probabilities(trainer, batches, routings)
            if recorded is not None and routings is not None:
                self._flips += recorded.flips(routings)
        if self._reference is not None:
            with self._reference.in_place():
                reference = current_log_probabilities(self._trainer, packed.batches)
        advantages = packed.of_answers(self._policy.advantages(groups))
        teacher = None
        if self._teacher is not None:
            teacher = self._teacher.log_probabilities(packed.batches)
            distilled = distillation_advantages(teacher, old) * packed.mask
            advantages = advantages + self._trainer.run.rl.opd_kl_coef * distilled
        count = max(1, packed.count)
        experience = Experience(old, sampler, reference, advantages, packed.mask, packed.sequences, count, teacher)
        return PolicyStep(batches, experience, compares)


def rollout_numbers(rollout: Rollout) -> dict[str, float]:
    """Returns the figures of a rollout's answers."""
    answers = [answer for group in rollout.groups for answer in group]
    rewards = torch.tensor([answer.reward for answer in answers], dtype=torch.float64)
    lengths = [len(answer.trained) for answer in answers]
    numbers = {
        "reward": float(rewards.mean()),
        "reward std": float(rewards.std(correction=0)),
        "answer length": sum(lengths) / len(lengths),
        "cut": sum(answer.is_cut for answer in answers) / len(answers),
        "without signal": rollout.without_signal / rollout.sampled,
        "sampled tokens": sum(lengths),
    }
    if any(answer.turns > 1 for answer in answers):
        numbers["turns"] = sum(answer.turns for answer in answers) / len(answers)
    failures = sum(bool(answer.failure) for answer in answers)
    if failures:
        numbers["failed rewards"] = failures
    names = sorted({name for answer in answers for name in answer.numbers})
    for name in names:
        values = [answer.numbers[name] for answer in answers if name in answer.numbers]
        numbers[name] = sum(values) / len(values)
    return numbers | {f"{phase} seconds": seconds for phase, seconds in rollout.seconds.items()}
