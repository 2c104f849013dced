"""Megatron-LM's order of samples, worked out once more from its description, one document and one sample at a time.

Shares no code with megatron/core/datasets. A row is (dataset, its sample, number of the cut, position and offset where
it begins, position and offset of its last token); documents by position are a list beside the rows.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass
class Reference:
    """documents: sequence numbers by position. samples: (cut, position, offset, position, offset) in reading order."""

    documents: list
    samples: list


def one_dataset(lengths, first, last, seq_length, num_samples, seed):
    """Order of the sequences [first, last), with `lengths` tokens each; num_samples None is one epoch."""
    tokens = sum(lengths[first:last])
    assert tokens, "no number of epochs would hold a sample"
    epochs = 1
    while num_samples is not None and epochs * tokens < num_samples * seq_length + 1:
        epochs += 1
    total = (epochs * tokens - 1) // seq_length
    joint = total
    if epochs > 1:
        without_last = ((epochs - 1) * tokens - 1) // seq_length
        if num_samples - without_last < int(0.8 * ((tokens - 1) // seq_length)):
            joint = without_last
    random = np.random.RandomState(seed)
    documents = []
    for count in [epochs] if joint == total else [epochs - 1, 1]:
        part = np.array(list(range(first, last)) * count)
        random.shuffle(part)
        documents += part.tolist()
    shuffle = []
    for low, high in [(0, total)] if joint == total else [(0, joint), (joint, total)]:
        part = np.arange(low, high)
        random.shuffle(part)
        shuffle += part.tolist()
    bounds = cuts(lengths, documents, seq_length, total)
    return Reference(documents, [(cut, *bounds[cut], *bounds[cut + 1]) for cut in shuffle])


def cuts(lengths, documents, seq_length, total):
    """(position, offset) of the tokens 0, seq_length, 2 seq_length ... of the documents laid end to end."""
    bounds, position, offset = [(0, 0)], 0, 0
    for _ in range(total):
        left = seq_length
        # A token lies in a document that goes on behind it, so one that ends there is left.
        while left >= lengths[documents[position]] - offset:
            left -= lengths[documents[position]] - offset
            position, offset = position + 1, 0
        offset += left
        bounds.append((position, offset))
    return bounds


def over_their_sum(weights):
    """Weights as shares of 1, in float64."""
    total = float(np.sum(np.array(weights, np.float64)))
    return [weight / total for weight in weights]


def blended(shares, num_samples):
    """[(dataset, its sample)]: always the one whose share of the places is furthest above what it gave."""
    given, order = [0] * len(shares), []
    for place in range(num_samples):
        behind = [share * float(max(place, 1)) - float(count) for share, count in zip(shares, given)]
        chosen = behind.index(max(behind))
        order.append((chosen, given[chosen]))
        given[chosen] += 1
    return order


def split_bounds(split, number_of_sequences):
    """[(first, last)] of training, validation and test; None where the share is nothing."""
    shares = [float(word) for word in split.split(",")]
    shares = [share / sum(shares) for share in shares + [0.0] * (3 - len(shares))]
    found, low = [], 0.0
    for share in shares:
        high = low + share
        found.append((round(low * number_of_sequences), round(high * number_of_sequences)) if high > low else None)
        low = high
    return found


def expected_rows(sets, weights, ranges, size, seq_length, seed, direct):
    """(members, rows) of one split: `sets` are lists of lengths, `ranges` their sequences; see the module."""
    if direct:
        members = [one_dataset(sets[0], *ranges[0], seq_length, size, seed)]
        order = [(0, number) for number in range(len(members[0].samples))]
    elif weights is None:
        members = [one_dataset(s, *r, seq_length, None, seed) for s, r in zip(sets, ranges)]
        sizes = [len(member.samples) for member in members]
        order = blended(over_their_sum(sizes), min(size, sum(sizes)))
    else:
        shares = over_their_sum(weights)
        parts = [math.ceil(size * share) for share in shares]
        members = [
            one_dataset(s, *r, seq_length, math.ceil(part * 1.005), seed) for s, r, part in zip(sets, ranges, parts)
        ]
        order = blended(over_their_sum(shares), sum(parts))  # as it is done there: twice
    return members, [(dataset, number, *members[dataset].samples[number]) for dataset, number in order]
