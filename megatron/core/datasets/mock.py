"""Synthetic samples that a model can learn, to try a configuration without a dataset."""

from __future__ import annotations

import numpy as np

from megatron.core.datasets.sample import Tokens, check_number

FACTOR, STEP = 7919, 13
NOISE = 0.1


class MockDataset:
    """Samples of a noisy affine sequence: the next token is (7919 t + 13) mod vocab_size, or random with probability
    0.1.

    A model that has learnt the rule reaches a loss of about 0.1 ln(vocab_size) + 0.33. Sample n depends only on (seed,
    n).
    """

    def __init__(self, num_samples: int, seq_length: int, vocab_size: int, seed: int) -> None:
        self.num_samples, self.seq_length, self.vocab_size, self.seed = num_samples, seq_length, vocab_size, seed
        # Token k positions after t is (factors[k] * t + steps[k]) mod vocab_size.
        factors, steps = [1], [0]
        for _ in range(seq_length):
            factors.append(factors[-1] * FACTOR % vocab_size)
            steps.append((steps[-1] * FACTOR + STEP) % vocab_size)
        self._factors, self._steps = np.array(factors, np.int64), np.array(steps, np.int64)

    def __len__(self) -> int:
        """Number of samples."""
        return self.num_samples

    def __getitem__(self, number: int) -> Tokens:
        """Token ids [seq_length + 1] of one sample."""
        check_number(self, number)
        random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self.seed, number])))
        size = self.seq_length + 1
        drawn = random.randint(0, self.vocab_size, size)
        fresh = random.random_sample(size) < NOISE
        fresh[0] = True
        # Each token follows from the last random token, which is `since` positions before it.
        places = np.arange(size)
        origin = np.maximum.accumulate(np.where(fresh, places, 0))
        since = places - origin
        return np.asarray((self._factors[since] * drawn[origin] + self._steps[since]) % self.vocab_size, np.int64)
