"""Documents that are packed into samples: a token attends to the tokens of its own document only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """The documents of b samples of t tokens. No document continues in the next sample.

    ids [b, t], int64, are equal inside a document and differ between the documents of a sample. `starts`, int32
    [documents + 1], are the first token of each document, with the tokens of one sample behind those of the sample
    before, and b * t at the end. `lengths` are the tokens of each document, on the host. A kernel that reads these two
    needs no mask. Without them (None and empty) only ids are known, as for new queries to a cache of keys.
    """

    ids: Tensor
    starts: Tensor | None = None
    lengths: tuple[int, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors on the device, which all layers share."""
        return [self.ids] if self.starts is None else [self.ids, self.starts]

    def of_last(self, t: int) -> Segments:
        """Returns the segments of the last t tokens, known by their ids alone."""
        return self if t == self.ids.shape[1] else Segments(self.ids[:, -t:])

    def by_sample(self) -> list[list[int]]:
        """Returns the lengths of each sample's documents."""
        b, t = self.ids.shape
        samples, place = [list[int]() for _ in range(b)], 0
        for length in self.lengths:
            samples[place // t].append(length)
            place += length
        assert place == b * t, "the lengths of the documents are not known, only their ids"
        return samples

    def padded(self, ids: Tensor) -> Segments:
        """Returns these segments with padding behind each sample, which is one more document. ids [b, t + padding]."""
        padding = ids.shape[1] - self.ids.shape[1]
        if padding == 0:
            return self
        return with_lengths(ids, [length for sample in self.by_sample() for length in (*sample, padding)])


def segments_of(ids: Tensor, device: torch.device) -> Segments:
    """Returns the segments on `device` of ids [b, t] in host memory, without waiting for the device."""
    b, t = ids.shape
    first = torch.ones(b, t, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = first.flatten().nonzero().flatten().tolist()
    return with_lengths(_sent(ids, device), [stop - start for start, stop in itertools.pairwise([*starts, b * t])])


def ids_of(segments: Segments | None) -> Tensor | None:
    """Returns the ids [b, t], or None without segments."""
    return None if segments is None else segments.ids


def starts_of(segments: Segments | None) -> Tensor | None:
    """Returns [b, t], bool, True at the first token of each document, or None without segments."""
    if segments is None:
        return None
    starts = torch.ones_like(segments.ids, dtype=torch.bool)
    torch.ne(segments.ids[:, 1:], segments.ids[:, :-1], out=starts[:, 1:])
    return starts


def with_lengths(ids: Tensor, lengths: Sequence[int]) -> Segments:
    """Returns the segments of ids [b, t] on their device, whose documents have these lengths. No ids are read."""
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return Segments(ids, _sent(starts, ids.device), tuple(lengths))


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """Returns host memory on the device. Only from page-locked memory the host need not wait for such a copy."""
    if device.type != "cuda":
        return x.to(device)
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x).to(device, non_blocking=True)


def in_order(*tensors: Tensor) -> list[Tensor]:
    """[s, b, heads, d] -> [b * s, heads, d], one sample behind the other as in `starts`: a copy if b > 1."""
    return [x.transpose(0, 1).flatten(0, 1) for x in tensors]
