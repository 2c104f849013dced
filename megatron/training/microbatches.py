"""How many samples a step reads, and in how many microbatches: constant, or ramped up over the first samples."""

from __future__ import annotations

from megatron.config.train import TrainConfig
from megatron.core.errors import ConfigError


class BatchSchedule:
    """Global batch size as a function of the samples read so far, for `dp` data-parallel replicas.

    With --rampup-batch-size START INCREMENT SAMPLES the batch grows from START to the global batch size in
    n = (global - START) / INCREMENT increments: after c samples it is START + floor(c n / SAMPLES) x INCREMENT.
    The batch sizes do not depend on dp; only the number of microbatches does.

    Raises ConfigError when a batch size of the schedule is not a multiple of micro batch size x dp.
    """

    def __init__(self, train: TrainConfig, dp: int) -> None:
        if train.micro_batch_size is None or train.micro_batch_size < 1:
            raise ConfigError(f"--micro-batch-size is {train.micro_batch_size}; give the samples of a forward pass")
        if train.train_iters is not None and train.train_samples is not None:
            raise ConfigError(
                f"--train-iters {train.train_iters} and --train-samples {train.train_samples} both give the length of "
                "the run; give one of them"
            )
        self._per_microbatch = train.micro_batch_size * dp
        asked = train.global_batch_size
        self.final_global_batch_size = self._per_microbatch if asked is None else asked
        self._start, self._increment, self._ramp_samples = _ramp(train.rampup_batch_size, self.final_global_batch_size)
        self._increments = (self.final_global_batch_size - self._start) // self._increment
        self._train_iters = train.train_iters
        self._train_samples = train.train_samples
        for step in range(self._increments + 1):
            self._check(self._start + step * self._increment, train.micro_batch_size, dp)

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples of the step that starts after `consumed_samples`, over all replicas."""
        if consumed_samples >= self._ramp_samples:
            return self.final_global_batch_size
        return self._start + consumed_samples * self._increments // self._ramp_samples * self._increment

    def num_microbatches(self, consumed_samples: int) -> int:
        """Forward passes of each replica in the step that starts after `consumed_samples`."""
        return self.global_batch_size(consumed_samples) // self._per_microbatch

    @property
    def final_num_microbatches(self) -> int:
        """Forward passes of each replica in a step of the final batch size."""
        return self.final_global_batch_size // self._per_microbatch

    def samples_for(self, iterations: int) -> int:
        """Samples that the first `iterations` steps of a run read."""
        done, samples = self._ramp_up(max_iterations=iterations)
        return samples + (iterations - done) * self.final_global_batch_size

    def iterations_for(self, samples: int) -> int:
        """Most steps a run can take without reading more than `samples`."""
        done, consumed = self._ramp_up(max_samples=samples)
        return done + max(0, samples - consumed) // self.final_global_batch_size

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

    def _ramp_up(self, max_iterations: int | None = None, max_samples: int | None = None) -> tuple[int, int]:
        """(steps, samples) of the ramp's part of a run, cut off where the next step would pass a limit."""
        iterations = samples = 0
        while samples < self._ramp_samples:
            size = self.global_batch_size(samples)
            if iterations == max_iterations or (max_samples is not None and samples + size > max_samples):
                break
            iterations, samples = iterations + 1, samples + size
        return iterations, samples

    def _check(self, batch_size: int, micro_batch_size: int, dp: int) -> None:
        if batch_size >= 1 and batch_size % self._per_microbatch == 0:
            return
        origin = "" if batch_size == self.final_global_batch_size else ", a step of --rampup-batch-size,"
        raise ConfigError(
            f"global batch size {batch_size}{origin} is not a multiple of micro batch size {micro_batch_size} x "
            f"dp {dp} = {self._per_microbatch}; choose batch sizes (START and INCREMENT of a ramp, "
            "too) that are, or change --micro-batch-size"
        )


def _ramp(asked: tuple[int, ...] | None, final: int) -> tuple[int, int, int]:
    """(start, increment, samples) of the ramp; a constant batch size is a ramp over no samples."""
    if asked is None:
        return final, 1, 0
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
    return start, increment, samples
