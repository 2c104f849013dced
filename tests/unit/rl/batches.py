"""Random sampled tokens, in any layout of rows, for the tests of this folder."""

import random

import torch

from megatron.rl.experience import Experience

SEEDS = range(20)
NAMES = ("log_probs", "old", "sampler", "reference", "advantages", "mask")


def draw(seed, *, sequences=7, longest=9):
    """A list of sequences: name -> fp32 [tokens]. Some tokens, and now and then all of one sequence, are masked."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for number in range(sequences):
        length = int(torch.randint(1, longest + 1, (), generator=generator))
        old = -torch.rand(length, generator=generator) * 3 - 0.05
        noise = torch.randn(3, length, generator=generator)
        mask = (torch.rand(length, generator=generator) < 0.8).float()
        if number != seed % sequences or seed % 3:
            mask[-1] = 1.0
        else:
            mask.zero_()
        advantage = torch.randn((), generator=generator)
        values = (old + noise[0] * 0.3, old, old + noise[1] * 0.4, old + noise[2] * 0.5)
        drawn.append(dict(zip(NAMES, (*values, advantage.expand(length), mask), strict=True)))
    return drawn


def lay_out(sequences, width, seed=0):
    """The sequences in rows of `width`, one after another where they fit, in a random order with gaps of padding.

    Returns log_probs [b, s], the Experience, and per sequence (row, first column).
    """
    rng = random.Random(seed)
    order = list(range(len(sequences)))
    rng.shuffle(order)
    places, row, column = {}, 0, 0
    for number in order:
        length = len(sequences[number]["old"])
        gap = rng.randint(0, 2)
        if column + gap + length > width:
            row, column, gap = row + 1, 0, 0
        places[number] = (row, column + gap)
        column += gap + length
    # Padding holds values that would show in any sum or maximum that included them.
    tensors = {name: torch.full((row + 1, width), 3.0 + at) for at, name in enumerate(NAMES)}
    tensors["mask"].zero_()
    numbers = torch.zeros(row + 1, width, dtype=torch.int64)
    for number, (r, c) in places.items():
        for name in NAMES:
            tensors[name][r, c : c + len(sequences[number]["old"])] = sequences[number][name]
        numbers[r, c : c + len(sequences[number]["old"])] = number
    log_probs = tensors.pop("log_probs")
    return log_probs, Experience(**tensors, sequences=numbers, count=len(sequences)), places


def by_sequence(tensor, sequences, places):
    """The values of a [b, s] tensor at the tokens of each sequence, as lists of floats."""
    return [
        tensor[places[n][0], places[n][1] : places[n][1] + len(sequences[n]["old"])].tolist()
        for n in range(len(sequences))
    ]


def floats(sequence):
    """The sequence as one tuple of floats (log_prob, old, sampler, reference, advantage, mask) per token."""
    return list(zip(*(sequence[name].tolist() for name in NAMES), strict=True))


def largest_error(values, expected):
    """The largest difference between two lists of lists of floats."""
    assert [len(row) for row in values] == [len(row) for row in expected]
    return max(abs(x - y) for row, other in zip(values, expected, strict=True) for x, y in zip(row, other, strict=True))
