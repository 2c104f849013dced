"""Converts token ids to the inputs of the model. See docs/batch.md for the whole life of a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.base.errors import MegatronError, UserError
from megatron.config.data import DataConfig
from megatron.core.comm.collectives import broadcast
from megatron.core.context_parallel.layout import pad, take
from megatron.core.datasets.sft import PADDING, TRAINED
from megatron.core.groups import Group, Groups
from megatron.kernels.ops.attention_segments import Segments, segments_of


@dataclass(frozen=True)
class Batch:
    """One microbatch of one replica; all [b, s], whole sequences. See `part_of_batch` for what a cp rank runs."""

    tokens: Tensor  # int64
    labels: Tensor  # int64, tokens shifted by one
    loss_mask: Tensor  # bool, False where a label does not count
    positions: Tensor  # int64; [1, s] when every sample counts from 0
    segments: Segments | None  # documents inside the samples, or None when attention crosses them
    length: int  # s of the whole sequences, where this is a context-parallel rank's part
    by_segment: bool = False  # whether segments have equal weight in the loss, instead of samples
    routed: Tensor | None = None  # bool, False in the padding of samples, which no expert gets; None without padding
    padding: tuple[int, ...] = ()  # tokens of each sample's padding, its last segment; empty without any
    context: int | None = None  # ranks that share the samples, where they are not those of cp
    weights: Tensor | None = None  # fp32, of the losses; None: those that training/step.py derives from the mask
    experts: Mapping[int, Tensor] | None = None  # number of a layer -> [b, s, k] to take instead of its router's choice


def part_of_batch(batch: Batch, cp: Group, multiple: int = 1) -> Batch:
    """Returns a context-parallel rank's part, [b, s / cp], with the segments of all tokens.
    `multiple`: see `part_of`."""
    if cp.size == 1:
        return batch
    segments = batch.segments
    return Batch(
        tokens=part_of(batch.tokens, cp, multiple),
        labels=part_of(batch.labels, cp, multiple),
        loss_mask=part_of(batch.loss_mask, cp, multiple),
        positions=part_of(batch.positions, cp, multiple),
        segments=None if segments is None else segments.padded(pad(segments.ids, 1, cp.size * multiple, -1)),
        length=batch.length,
        by_segment=batch.by_segment,
        routed=None if batch.routed is None else part_of(batch.routed, cp, multiple),
        context=batch.context,
        weights=None if batch.weights is None else part_of(batch.weights, cp, multiple),
    )


def part_of(x: Tensor, cp: Group, multiple: int = 1) -> Tensor:
    """[b, s] -> [b, s / cp], the tokens of this rank. Sequences are padded with zeros, behind their last token, to a
    multiple of 2 x cp x `multiple`."""
    return x if cp.size == 1 else take(pad(x, 1, cp.size * multiple), 1, cp.rank, cp.size)


SegmentFinder = Callable[[Tensor, torch.device], Segments]  # `segments_of`, or a function with its contract


def make_batch(
    ids: Tensor,
    eod: int,
    data: DataConfig,
    on_host: Tensor | None = None,
    find_segments: SegmentFinder = segments_of,
) -> Batch:
    """ids [b, s + 1] -> Batch. A document ends with `eod`; the token after it begins the next one.

    on_host: the same ids in host memory; None copies them there, where documents are separate.
    """
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    s = tokens.shape[1]
    index = torch.arange(s, device=ids.device)
    is_eod = tokens == eod
    loss_mask = ~is_eod if data.eod_mask_loss else torch.ones_like(is_eod)
    positions, segments = index.unsqueeze(0), None
    if data.reset_position_ids:
        positions = index - torch.where(_behind(is_eod), index, 0).cummax(dim=1).values
    if data.reset_attention_mask:
        ends = (ids if on_host is None else on_host).cpu()[:, :-1] == eod
        segments = find_segments(_behind(ends).long().cumsum(dim=1), ids.device)
    return Batch(tokens, labels, loss_mask, positions, segments, s)


def _behind(ends: Tensor) -> Tensor:
    """Returns where the token before is marked, [b, s] like `ends`."""
    return F.pad(ends[:, :-1], (1, 0))


def make_sft_batch(rows: Tensor, on_host: Tensor | None = None, find_segments: SegmentFinder = segments_of) -> Batch:
    """Conversations [b, 3, s], laid out as in core/datasets/sft.py -> Batch.
    Attention and positions stay inside of them.

    on_host: see `make_batch`.
    """
    tokens, marks, numbers = (row.contiguous() for row in rows.unbind(dim=1))
    trained, host = marks == TRAINED, (rows if on_host is None else on_host).cpu()
    segments = find_segments(host[:, 2].contiguous(), rows.device)
    padding = tuple((host[:, 1] == PADDING).sum(1).tolist())
    # roll() wraps the first token into the last label; the loss mask drops it,
    # like the first token of any conversation.
    labels, loss_mask = tokens.roll(-1, dims=1), trained.roll(-1, dims=1)
    index = torch.arange(tokens.shape[1], device=rows.device)
    is_first = numbers != numbers.roll(1, dims=1)
    positions = index - torch.where(is_first, index, 0).cummax(dim=1).values
    routed = marks != PADDING
    s = tokens.shape[1]
    return Batch(tokens, labels, loss_mask, positions, segments, s, by_segment=True, routed=routed, padding=padding)


def stacked_for(samples: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the samples as one tensor of the host, from which a copy to `device` does not block the host.

    For CUDA it is in page-locked memory, where torch.stack itself does not put it, and the host waits for copies from
    any other. torch gives such memory to another tensor only when the copy has ended.
    """
    pinned = device.type == "cuda"
    out = torch.empty((len(samples), *samples[0].shape), dtype=samples[0].dtype, pin_memory=pinned)
    return torch.stack(list(samples), out=out)


class BatchSource(Protocol):
    """Where the microbatches of a replica come from."""

    def read(self, num_microbatches: int) -> list[Batch]:
        """The next microbatches. Only a source of packed answers may return another number of them."""
        ...

    def read_ahead(self, num_microbatches: int) -> None:
        """Prepares the next `read` while the device computes, where that is possible. No communication."""
        ...

    def close(self) -> None:
        """Ends the processes that the source has started. Nothing can be read afterwards."""
        ...


class BatchReader:
    """Microbatches of this replica, the same on all its tp ranks."""

    def __init__(
        self,
        loader: Iterator[Tensor] | None,
        data: DataConfig,
        *,
        eod: int,
        micro_batch_size: int,
        groups: Groups,
        device: torch.device,
        find_segments: SegmentFinder = segments_of,
    ) -> None:
        """`loader` yields [b, s + 1] ids, or with data.sft [b, 3, s] rows; it is needed on tp rank 0 only.

        find_segments: finds the documents of samples, on the host.
        """
        assert data.seq_length
        self._loader, self._data, self._eod, self._groups, self._device = loader, data, eod, groups, device
        self._find_segments = find_segments
        sample = (3, data.seq_length) if data.sft else (data.seq_length + 1,)
        self._shape = (micro_batch_size, *sample)
        self._ahead: deque[Tensor] = deque()  # microbatches that were read before they are needed
        self._error: Exception | None = None  # that ended the reading ahead

    def read(self, num_microbatches: int) -> list[Batch]:
        """The next microbatches. Communication: one broadcast over tp of all samples, int64.

        The host finds the documents, because kernels are launched for their number and lengths. Where it has read the
        samples itself it does not wait for the device; other tp ranks wait once, for the broadcast.
        """
        data, on_host = self._data, None
        if self._groups.tp.rank == 0:
            on_host = stacked_for([self._take() for _ in range(num_microbatches)], self._device)
            ids = on_host.to(self._device, non_blocking=True)
        else:
            ids = torch.empty((num_microbatches, *self._shape), dtype=torch.int64, device=self._device)
        broadcast(ids, self._groups.tp)
        if not data.separate_documents:
            return [make_batch(samples, self._eod, data) for samples in ids]
        pairs = zip(ids, ids.cpu() if on_host is None else on_host, strict=True)
        if data.sft:
            return [make_sft_batch(rows, copy, self._find_segments) for rows, copy in pairs]
        return [make_batch(samples, self._eod, data, copy, self._find_segments) for samples, copy in pairs]

    def read_ahead(self, num_microbatches: int) -> None:
        """Reads the samples of the next `read` while the device computes. An error is raised when they are needed.

        No communication.
        """
        if self._groups.tp.rank > 0:
            return
        try:
            while len(self._ahead) < num_microbatches:
                self._ahead.append(self._next())
        except Exception as error:
            self._error = error

    def close(self) -> None:
        """Ends the processes that load data. Nothing can be read afterwards."""
        self._ahead.clear()
        if isinstance(self._loader, Generator):
            self._loader.close()
        self._loader = None

    def _take(self) -> Tensor:
        if self._ahead:
            return self._ahead.popleft()
        if self._error is not None:
            raise self._error
        return self._next()

    def _next(self) -> Tensor:
        assert self._loader is not None
        try:
            return next(self._loader)
        except UserError as error:
            error.on_all_ranks = False  # the other ranks read other samples
            raise
        except (RuntimeError, ConnectionError, EOFError) as error:
            # How torch reports a killed worker depends on the call in which it waits.
            if isinstance(error, RuntimeError) and "DataLoader worker (pid" not in str(error):
                raise
            raise MegatronError(
                f"a data-loading process was killed ({' '.join(str(error).splitlines())}); if memory ran out, lower "
                f"--num-workers {self._data.num_workers}; 0 loads in the training process"
            ) from error
