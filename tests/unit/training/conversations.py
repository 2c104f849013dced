"""Conversations in memory, and samples of them packed, or one each, in the layout of core/datasets/sft.py."""

import torch

from tests.unit.models.builds import VOCAB


def make_conversations(count, longest, seed=0):
    """[(tokens, whether each is trained on)] of very different lengths and numbers of trained tokens."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(2, longest + 1, (), generator=generator))
        trained = torch.rand(length, generator=generator) < 0.4
        trained[-1] = True
        made.append((torch.randint(0, VOCAB, (length,), generator=generator), trained))
    return made


def sample_of(conversations, seq_length):
    """Rows [3, s] of one sample."""
    rows = torch.zeros(3, seq_length, dtype=torch.long)
    at = 0
    for number, (tokens, trained) in enumerate(conversations):
        end = at + len(tokens)
        rows[0, at:end], rows[1, at:end], rows[2, at:end] = tokens, trained, number
        rows[1, at] = 0
        at = end
    assert at <= seq_length
    rows[2, at:] = len(conversations)
    return rows


def packed(conversations, seq_length, samples):
    """[samples, 3, s]: each conversation goes where there is most space."""
    held, space = [[] for _ in range(samples)], [seq_length] * samples
    for conversation in sorted(conversations, key=lambda pair: -len(pair[0])):
        best = max(range(samples), key=lambda number: space[number])
        held[best].append(conversation)
        space[best] -= len(conversation[0])
    return torch.stack([sample_of(mine, seq_length) for mine in held])


def alone(conversations, seq_length):
    """[conversations, 3, s]."""
    return torch.stack([sample_of([conversation], seq_length) for conversation in conversations])
