"""The samples and microbatches of each step: constant, ramped up, or in steps over the first samples."""

from __future__ import annotations

import bisect

from megatron.base.errors import ConfigError
from megatron.config.train import BATCH_STEPS_FLAG, TrainConfig, parse_steps

_NEVER = 1 << 62  # more iterations and more samples than a run has


class BatchSchedule:
    """Global batch size as a function of the samples read so far, for `dp` data-parallel replicas.

    With --rampup-batch-size START INCREMENT SAMPLES the batch grows from START to the global batch size in
    n = (global - START) / INCREMENT increments: after c samples it is START + floor(c n / SAMPLES) x INCREMENT.
    With --step-batch-size-schedule it is that of the last threshold that is passed; thresholds are tokens, or samples
    where `seq_length` is None. The batch sizes do not depend on dp; only the number of microbatches does.

    The flags have passed `config/rules/training.py`, which looks at the last size of --step-batch-size-schedule only:
    `check_from` checks those that are still to come.
    """

    def __init__(self, train: TrainConfig, dp: int, seq_length: int | None = None) -> None:
        assert train.micro_batch_size
        self._micro_batch_size, self._dp = train.micro_batch_size, dp
        self._per_microbatch = train.micro_batch_size * dp
        self._train_iters = train.train_iters
        self._train_samples = train.train_samples
        if train.step_batch_size_schedule is not None:
            self._steps = parse_steps(train.step_batch_size_schedule, seq_length)
            return
        final = self._per_microbatch if train.global_batch_size is None else train.global_batch_size
        self._steps = _ramp(train.rampup_batch_size, final)

    @property
    def final_global_batch_size(self) -> int:
        """Samples of a step at the end of a ramp or a schedule."""
        return self._steps[-1][1]

    def check_from(self, consumed_samples: int) -> None:
        """Raises ConfigError if a later batch size is not a multiple of micro batch size x dp."""
        for _, size in self._steps[self._place(consumed_samples) :]:
            problem = not_whole(f"a step of {BATCH_STEPS_FLAG} of", size, self._micro_batch_size, self._dp)
            if problem is not None:
                raise ConfigError(problem)

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples of the step that starts after `consumed_samples`, over all replicas."""
        return self._steps[self._place(consumed_samples)][1]

    def num_microbatches(self, consumed_samples: int) -> int:
        """Microbatches per replica in the step that starts after `consumed_samples`."""
        return self.global_batch_size(consumed_samples) // self._per_microbatch

    @property
    def final_num_microbatches(self) -> int:
        """Microbatches per replica in a step of the final batch size."""
        return self.final_global_batch_size // self._per_microbatch

    def samples_for(self, iterations: int) -> int:
        """Samples that the first `iterations` steps of a run read."""
        return self._walk(max_iterations=iterations)[1]

    def iterations_for(self, samples: int) -> int:
        """Most steps a run can take without reading more than `samples`."""
        return self._walk(max_samples=samples)[0]

    @property
    def total_iterations(self) -> int:
        """Steps of the whole run."""
        if self._train_iters is not None:
            return self._train_iters
        return self.iterations_for(self.total_samples)

    @property
    def total_samples(self) -> int:
        """Number of samples that training reads: --train-samples itself, or the sum over --train-iters steps."""
        if self._train_samples is not None:
            return self._train_samples
        assert self._train_iters is not None
        return self.samples_for(self._train_iters)

    def last_iteration(self, iteration: int, consumed_samples: int) -> int:
        """The number of the run's last step, after `iteration` steps that have read `consumed_samples`.

        With --train-samples it is counted from there: the steps up to now may have had another batch size.
        """
        if self._train_samples is None:
            return self.total_iterations
        return iteration + self.iterations_for(self._train_samples) - self.iterations_for(consumed_samples)

    def samples_left(self, iteration: int, consumed_samples: int) -> int:
        """Samples that training still reads after `iteration` steps that have read `consumed_samples`."""
        if self._train_samples is not None:
            return max(0, self._train_samples - consumed_samples)
        return self.total_samples - self.samples_for(min(iteration, self.total_iterations))

    def _place(self, consumed_samples: int) -> int:
        """Number of the batch size that holds after so many samples."""
        return bisect.bisect_right(self._steps, consumed_samples, key=lambda step: step[0]) - 1

    def _walk(self, max_iterations: int = _NEVER, max_samples: int = _NEVER) -> tuple[int, int]:
        """(steps, samples) of a run from its beginning until the next step would pass a limit; one of them is given."""
        iterations = samples = 0
        ends = [*(first for first, _ in self._steps[1:]), _NEVER]
        for (_, size), end in zip(self._steps, ends, strict=True):
            whole = max(0, -((samples - end) // size))
            taken = min(whole, max_iterations - iterations, (max_samples - samples) // size)
            iterations, samples = iterations + taken, samples + taken * size
            if taken < whole:
                break
        return iterations, samples


def not_whole(name: str, size: int, micro_batch_size: int, dp: int) -> str | None:
    """Returns the problem of a batch size that is not a whole number of microbatches per replica; else None.

    `name` is printed before the number.
    """
    unit = micro_batch_size * dp
    if size % unit == 0:
        return None
    return f"{name} {size} is not a multiple of {unit_of(micro_batch_size, dp)}; change one of them"


def unit_of(micro_batch_size: int, dp: int) -> str:
    """Where the samples of one microbatch of all replicas come from, for messages."""
    return f"--micro-batch-size {micro_batch_size} x data-parallel size {dp} = {micro_batch_size * dp}"


def _ramp(ramp: tuple[int, ...] | None, final: int) -> tuple[tuple[int, int], ...]:
    """(first sample, batch size) of each batch size of a ramp; a constant one begins at 0."""
    if ramp is None:
        return ((0, final),)
    start, increment, samples = ramp
    count = (final - start) // increment
    return tuple((-(-number * samples // max(1, count)), start + number * increment) for number in range(count + 1))
