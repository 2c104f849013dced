"""--dynamic-context-parallel: the documents of a global batch on the ranks that compute them.

Every replica has read its samples, and the weights of their tokens are made. Here the samples are taken apart, and each
rank gets the documents of its microbatches. A token keeps its position, labels and weights, so losses and gradients are
those of the samples, up to the order of sums. Padding is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.config.context_parallel import GroupSizes
from megatron.core.comm.all_to_all import all_to_all_v
from megatron.core.comm.collectives import gather_objects
from megatron.core.context_parallel.assignment import Share, assign, of_rank
from megatron.core.groups import Groups
from megatron.kernels.ops.attention_segments import segments_of
from megatron.training.batch import Batch
from megatron.training.microbatches import Targets


class BalancedDocuments:
    """Assigns the documents of each step to ranks, see [Note: balanced documents] in context_parallel/assignment.py."""

    def __init__(self, groups: Groups, sizes: GroupSizes, work: Callable[[int], float], seq_length: int) -> None:
        """work: of a document, by its length. seq_length: tokens of a sample that is read."""
        self._groups, self._sizes, self._work, self._seq_length = groups, sizes, work, seq_length

    def shared_out(
        self, samples: Sequence[Batch], targets: Sequence[Sequence[Targets]]
    ) -> tuple[list[Batch], list[list[Targets]]]:
        """Returns the microbatches of this rank, equally many on all ranks, and their targets.

        samples: with segments. targets: of each of them. Communication over dp: a gather of the lengths of documents,
        for which the host waits, and an exchange of tokens. A rank receives the whole documents that it shares.
        """
        groups, dp = self._groups, self._groups.dp
        tokens = torch.cat([_rows(batch, depths) for batch, depths in zip(samples, targets, strict=True)])
        pieces, local_lengths = _documents(samples)
        by_replica: list[list[int]] = gather_objects(local_lengths, dp)
        lengths = list(itertools.chain(*by_replica))
        ends = list(itertools.accumulate(map(len, by_replica), initial=0))
        slots = assign(lengths, self._sizes, self._work)
        cp, column = groups.cp.size, groups.cp.rank
        wanted = [_numbers(of_rank(slots, replica * cp + column)) for replica in range(dp.size)]  # by each replica

        local = dict(zip(range(*ends[dp.rank : dp.rank + 2]), _without_padding(tokens, pieces), strict=True))
        sent = [[local[number] for number in numbers if number in local] for numbers in wanted]
        coming = [
            [number for number in wanted[dp.rank] if first <= number < end] for first, end in itertools.pairwise(ends)
        ]
        received = all_to_all_v(
            torch.cat([tokens[:0], *itertools.chain(*sent)]),
            [sum(map(len, parts)) for parts in sent],
            [sum(lengths[number] for number in numbers) for numbers in coming],
            dp,
            "documents",
        )
        order = list(itertools.chain(*coming))
        documents = dict(zip(order, received.split([lengths[number] for number in order]), strict=True))
        microbatches = [self._microbatch(share, documents, tokens) for share in of_rank(slots, dp.rank * cp + column)]
        return [batch for batch, _ in microbatches], [depths for _, depths in microbatches]

    def _microbatch(self, share: Share, documents: dict[int, Tensor], like: Tensor) -> tuple[Batch, list[Targets]]:
        """The sequence of a share, padded so that its ranks can divide it; an idle share is nothing but padding."""
        parts = [documents[number] for number in share.documents]
        lengths, step = [len(part) for part in parts], self._sizes.multiple(share.size)
        content = sum(lengths)
        if padding := -content % step if content else step:
            parts.append(like.new_zeros((padding, like.shape[1])))
            lengths.append(padding)
        tokens, positions, *depths = (column.contiguous() for column in torch.cat(parts).t().unsqueeze(1))
        triples = zip(depths[::3], depths[1::3], depths[2::3], strict=True)
        targets = [Targets(labels, mask.bool(), weights.int().view(torch.float32)) for labels, mask, weights in triples]
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        batch = Batch(
            tokens=tokens,
            labels=targets[0].labels,
            loss_mask=targets[0].mask,
            positions=positions,
            segments=segments_of(numbers.unsqueeze(0), tokens.device),
            length=self._seq_length,
            routed=torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0) < content if padding else None,
            context=share.size,
        )
        return batch, targets


def _rows(batch: Batch, depths: Sequence[Targets]) -> Tensor:
    """Returns all numbers of a token, int64 [b * s, columns]: id, position, and label, mask and the bits of the weight
    of each depth."""
    columns = [batch.tokens, batch.positions.expand_as(batch.tokens)]
    for depth in depths:
        assert depth.weights.dtype == torch.float32, depth.weights.dtype
        columns += [depth.labels, depth.mask.long(), depth.weights.view(torch.int32).long()]
    return torch.stack(columns, dim=-1).flatten(0, 1)


def _documents(samples: Sequence[Batch]) -> tuple[list[tuple[int, bool]], list[int]]:
    """Returns (length, whether it is a document) of each segment of the samples, and the lengths of documents. Padding
    is the last segment of a sample."""
    pieces = []
    for batch in samples:
        assert batch.segments is not None, "the documents of samples are not known"
        by_sample = batch.segments.by_sample()
        for segments, padding in itertools.zip_longest(by_sample, batch.padding, fillvalue=0):
            assert isinstance(segments, list)
            pieces += [(length, True) for length in segments[: len(segments) - (padding > 0)]]
            pieces += [(padding, False)] * (padding > 0)
    return pieces, [length for length, is_document in pieces if is_document]


def _without_padding(tokens: Tensor, pieces: Sequence[tuple[int, bool]]) -> list[Tensor]:
    split = tokens.split([length for length, _ in pieces])
    return [part for part, (_, is_document) in zip(split, pieces, strict=True) if is_document]


def _numbers(shares: Sequence[Share]) -> list[int]:
    return [number for share in shares for number in share.documents]
