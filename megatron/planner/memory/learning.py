"""The memory that train_rl.py needs besides that of a training step: log-probabilities, the reference, sampled answers.

A rank's peak is that of the phase with the most: sampling, the forwards for log-probabilities, or the training step.
Answers are planned with their longest length, so that each fills a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.planner.memory.forward_only import log_probabilities_of_stage
from megatron.planner.memory.sampling import samples, sampling_memory, sampling_shape
from megatron.planner.memory.sizes import batch_bytes
from megatron.schedule.partition import Stage
from megatron.spec.decoder import DecoderSpec
from megatron.spec.memory.trace import BATCH, OPTIMIZER, PARAMETERS, REFERENCE, Profile
from megatron.spec.sizes import FP32, INT64, Sizes

SAMPLING, LOG_PROBABILITIES, REFERENCE_PASS, TRAINING = (
    "sampling",
    "log-probabilities",
    "log-probabilities of the reference",
    "training step",
)


@dataclass(frozen=True)
class PhaseMemory:
    """A phase of a step. at_peak: bytes by kind at the moment with the most, which `moment` names."""

    name: str
    at_peak: Mapping[str, int]
    moment: str

    @property
    def peak(self) -> int:
        """The most bytes in use at once."""
        return sum(self.at_peak.values())


@dataclass(frozen=True)
class LearningMemory:
    """The bytes that a run needs in addition to parameters, gradients and optimizer.

    reference: the copy of the trained weights on this rank; 0 without a reference. batches: of microbatches of the
    steps that wait for their turn, with all that objectives read of them. packed: of all microbatches that follow from
    one rollout, or from the pairs of a step.
    """

    reference: int
    waiting: int
    packed: int


def learning_memory(run: RunConfig, settings: RunSettings, sizes: Sizes, trained: int) -> LearningMemory:
    """Returns the memory of the data of a run that learns. trained: bytes of the trained weights of this rank."""
    rl, batches = run.rl, settings.batches
    of_step = batches.final_num_microbatches
    rows = sizes.tokens * sizes.cp  # log-probabilities and masks are of whole sequences
    if not samples(run):
        # The answers of a pair fill up to two rows. Log-probabilities of both weights, masks and numbers of answers.
        return LearningMemory(trained, 0, 2 * of_step * (batch_bytes(sizes) + rows * (3 * FP32 + INT64)))
    steps = rl.answers_per_rollout // batches.final_global_batch_size
    microbatch = batch_bytes(sizes) + rows * (5 * FP32 + INT64)
    others = steps if rl.grpo_iterations > 1 else steps - 1
    return LearningMemory(
        trained if rl.grpo_kl_beta else 0, others * of_step * microbatch, steps * of_step * microbatch
    )


def learning_phases(
    spec: DecoderSpec,
    stages: Sequence[Stage],
    run: RunConfig,
    settings: RunSettings,
    sizes: Sizes,
    state: Mapping[str, int],
    memory: LearningMemory,
    whole: int,
    imbalance: float,
) -> Iterator[PhaseMemory]:
    """Yields the phases before the training step of a rank, which samples from one stage. state: bytes between steps by
    kind. whole: bytes of all parameters of the rank, which is more than it has between steps where they are sharded or
    in host memory. imbalance: of the load of experts, see `expert_rows`."""
    held = memory.reference if sizes.target.cpu else 0
    if samples(run) and run.rl.rl_external_sampler is None:
        shape = sampling_shape(run, settings)
        (stage,) = stages
        sampled = sampling_memory(spec, stage, run, settings, sizes.target, shape, imbalance)
        meanwhile = Counter(state)
        meanwhile[PARAMETERS] = max(whole, meanwhile[PARAMETERS])
        if run.rl.rl_offload_optimizer_during_inference and not sizes.target.cpu:
            del meanwhile[OPTIMIZER]
        yield _phase(SAMPLING, sampled, meanwhile, {REFERENCE: held})
    forward = max(
        (log_probabilities_of_stage(spec, stage, sizes) for stage in stages), key=lambda profile: profile.peak
    )
    yield _phase(LOG_PROBABILITIES, forward, state, {REFERENCE: held, BATCH: memory.packed})
    if memory.reference:  # the current weights are in host memory meanwhile
        yield _phase(REFERENCE_PASS, forward, state, {REFERENCE: 2 * held, BATCH: memory.packed})


def _phase(name: str, profile: Profile, *parts: Mapping[str, int]) -> PhaseMemory:
    total = Counter(profile.top)
    for part in parts:
        total.update(part)
    return PhaseMemory(name, total, f"{name}: {profile.moment}")
