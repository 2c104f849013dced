"""How many samples a step reads, and in how many microbatches: constant, ramped up, or in steps over the first samples."""

from __future__ import annotations

import bisect

from megatron.base.errors import ConfigError
from megatron.config.batch_steps import FLAG, parse_steps
from megatron.config.train import TrainConfig

_NEVER = 1 << 62  # more iterations and more samples than a run has


class BatchSchedule:
    """Global batch size as a function of the samples read so far, for `dp` data-parallel replicas.

    With --rampup-batch-size START INCREMENT SAMPLES the batch grows from START to the global batch size in
    n = (global - START) / INCREMENT increments: after c samples it is START + floor(c n / SAMPLES) x INCREMENT.
    With --step-batch-size-schedule it is that of the last threshold that is passed; thresholds are tokens, or samples
    where `seq_length` is None. The batch sizes do not depend on dp; only the number of microbatches does.

    Raises ConfigError when a batch size is not a multiple of micro batch size x dp. Of a schedule only the last one is
    looked at: `check_from` looks at those that are still to come.
    """

    def __init__(self, train: TrainConfig, dp: int, seq_length: int | None = None) -> None:
        if train.micro_batch_size is None or train.micro_batch_size < 1:
            raise ConfigError(f"--micro-batch-size is {train.micro_batch_size}; give the samples of a forward pass")
        if train.train_iters is not None and train.train_samples is not None:
            raise ConfigError(
                f"--train-iters {train.train_iters} and --train-samples {train.train_samples} both give the length of "
                "the run; give one of them"
            )
        self._micro_batch_size, self._dp = train.micro_batch_size, dp
        self._per_microbatch = train.micro_batch_size * dp
        self._train_iters = train.train_iters
        self._train_samples = train.train_samples
        if train.step_batch_size_schedule is not None:
            self._steps, self._origin = parse_steps(train.step_batch_size_schedule, seq_length), FLAG
            self._check(self.final_global_batch_size)
            return
        final = self._per_microbatch if train.global_batch_size is None else train.global_batch_size
        self._steps, self._origin = _ramp(train.rampup_batch_size, final), "--rampup-batch-size"
        for _, size in self._steps:
            self._check(size)

    @property
    def final_global_batch_size(self) -> int:
        """Samples of a step at the end of a ramp or a schedule."""
        return self._steps[-1][1]

    def check_from(self, consumed_samples: int) -> None:
        """Raise ConfigError when a batch size that is still to come is not a multiple of micro batch size x dp."""
        for _, size in self._steps[self._place(consumed_samples) :]:
            self._check(size)

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples of the step that starts after `consumed_samples`, over all replicas."""
        return self._steps[self._place(consumed_samples)][1]

    def num_microbatches(self, consumed_samples: int) -> int:
        """Forward passes of each replica in the step that starts after `consumed_samples`."""
        return self.global_batch_size(consumed_samples) // self._per_microbatch

    @property
    def final_num_microbatches(self) -> int:
        """Forward passes of each replica in a step of the final batch size."""
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
        """Samples that training data must hold: --train-samples itself, or what --train-iters steps read."""
        if self._train_samples is not None:
            return self._train_samples
        if self._train_iters is None:
            raise ConfigError("the length of the run is not given; give --train-iters or --train-samples")
        return self.samples_for(self._train_iters)

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

    def _check(self, batch_size: int) -> None:
        if batch_size >= 1 and batch_size % self._per_microbatch == 0:
            return
        origin = "" if batch_size == self.final_global_batch_size else f", a step of {self._origin},"
        raise ConfigError(
            f"global batch size {batch_size}{origin} is not a multiple of micro batch size {self._micro_batch_size} x "
            f"dp {self._dp} = {self._per_microbatch}; choose batch sizes (START and INCREMENT of a ramp, "
            "too) that are, or change --micro-batch-size"
        )


def _ramp(asked: tuple[int, ...] | None, final: int) -> tuple[tuple[int, int], ...]:
    """(first sample, batch size) of each batch size of a ramp; a constant one begins at 0."""
    if asked is None:
        return ((0, final),)
    if len(asked) != 3:
        raise ConfigError(f"--rampup-batch-size takes START INCREMENT SAMPLES, got {len(asked)} numbers: {asked}")
    start, increment, samples = asked
    if min(asked) < 1:
        raise ConfigError(f"--rampup-batch-size takes positive numbers, got {start} {increment} {samples}")
    if start > final or (final - start) % increment:
        raise ConfigError(
            f"--rampup-batch-size {start} {increment} {samples} does not reach --global-batch-size {final}: "
            f"{final} - {start} must be a multiple of {increment}, and not negative"
        )
    count = (final - start) // increment
    return tuple((-(-number * samples // max(1, count)), start + number * increment) for number in range(count + 1))
