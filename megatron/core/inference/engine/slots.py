"""A batch that sequences join and leave between steps: the model's steps over the caches of its layers (caches.py).

[Note: rows and columns]
A running sequence has one row; rows have no gaps. All rows end in the same column, so a step writes one column, and the
distance between two columns of a row equals that of their positions, on which sliding windows rely. The columns before
a row's first one are zeros, and a separate segment in the attention mask. When a prompt is longer than the columns in
use, or the last column of the cache is reached, all rows are moved: rarely, and by whole columns.

[Note: prompts of different lengths] Prompts that are read together are padded on the left. A sequence's positions count
from its first token, and padding is a document of its own, so a sequence gets the same results as it would alone. A GPU
reads prompts without a mask. The cache gets zeros for padding: so numbers that are not finite stay in the row of the
prompt that has them, and leave with it.

[Note: outgrown frequencies] LongRoPE rotates a sequence with its short factors up to the original context length, and
with its long factors above. When a sequence grows beyond that length, all its keys change, and through attention also
its values. So its tokens are read again, once. Every step then gives the logits of a full forward, as in transformers'
generate.

[Note: replicas that share experts] Under expert parallelism a forward exchanges tokens with the other replicas, which
generate other sequences and so run another number of forwards. So each forward begins with a sum over the ranks that
share experts, and a replica that has ended goes on to take part with one token of no meaning until that sum is zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.core.comm.collectives import all_gather, all_reduce, broadcast
from megatron.core.device import headroom
from megatron.core.inference.engine.caches import CacheColumns, CachePlace, SlotExperts, layer_cache
from megatron.core.inference.engine.logprobs import Logprobs, log_sum_exps, token_logprobs
from megatron.core.inference.engine.staged import StagedModel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.context import Build
from megatron.kernels.ops.attention_segments import Segments, segments_of

_READ, _READ_SCORED, _STEP, _REMOVE, _IDLE, _ACCOMPANY, _CLOSE = range(
    7
)  # the commands that the first rank sends to the others


class SlotDecoder:
    """Up to `slots` sequences that a model reads from left to right, each at its own position.

    Only the first rank of tp x pp calls `read`, `step`, `remove`, `idle` and `close`; all others execute `follow`
    meanwhile and carry out its commands. Communication per call: one or two broadcasts of a few numbers over tp x pp;
    in `read` and `step` also StagedModel's, and one all-gather of [vocab / tp, rows] over tp.
    """

    def __init__(
        self, model: GPTModel, build: Build, *, slots: int, capacity: int, records_experts: bool = False
    ) -> None:
        """`model` is in evaluation mode, built without sequence parallelism, and holds this pipeline rank's stage.
        `capacity` is the longest sequence, prompt and continuation together. The cache of a layer has
        `cache_bytes` of its specification for each slot. records_experts: `experts` are kept, for which a layer with experts
        has capacity x slots x k elements of two bytes.
        """
        assert not build.sequence_parallel, "steps of one position cannot be sharded along the sequence"
        self.slots, self.capacity = slots, capacity
        self._place = CachePlace(slice(0), slice(0), slice(0))
        self._model, self._build = StagedModel(model, build), build
        self._groups, self._device = build.groups, build.device
        # See [Note: replicas that share experts].
        self._shares_experts = bool(build.config.num_experts) and build.groups.ep.size > 1
        self._caches = [layer_cache(core, slots, capacity, build, self._place) for core in self._model.cached]
        # Number of a sequence, in the order in which they are read -> the experts [tokens, layers, k] of its tokens in
        # the layers of this rank, int16 in host memory. They are there when the sequence is removed.
        self.experts: dict[int, Tensor] = {}
        self._chosen: SlotExperts | None = None
        if records_experts and (routers := self._model.routers):
            self._chosen = SlotExperts(capacity, slots, routers, build.device, self._place)
        originals = [rotary.longrope.original for rotary in build.spec.rotaries if rotary.longrope is not None]
        assert len(originals) < 2, "sequences are read again at one length"
        self._short = originals[0] if originals else None  # longest sequence with its short factors
        self._sequences: list[list[int]] = []  # the tokens of each row
        self._numbers: list[int] = []  # of the sequence of each row
        self._read_sequences = 0
        self._end = 0  # one past the last column in use

    @property
    def nbytes(self) -> int:
        """Bytes of the cache on this rank."""
        return sum(columns.nbytes for columns in self._columns)

    @property
    def _columns(self) -> list[CacheColumns]:
        return [*self._caches, *([] if self._chosen is None else [self._chosen])]

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model knows, without padding."""
        assert self._build.config.vocab_size
        return self._build.config.vocab_size

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Reads prompts into new last rows, in one forward. Returns the logits after each [prompts, padded vocab]."""
        self._tell(_READ, _flat(prompts))
        return self._next_logits(self._read(prompts), len(prompts))

    def read_scored(self, prompts: Sequence[Sequence[int]], top: int, candidates: int) -> tuple[Tensor, list[Logprobs]]:
        """Like `read`, and also returns the log-probabilities of all tokens of each prompt but its first.

        They include the `top` likeliest ids below `candidates` at each position. Communication in addition to that of
        `read`: an all-gather over tp and a broadcast over pp of a few numbers per token.
        """
        self._tell(_READ_SCORED, [top, candidates, *_flat(prompts)])
        return self._read_scored(prompts, top, candidates)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Reads one more token in every row. Returns the logits after them [rows, padded vocab]."""
        self._tell(_STEP, tokens)
        return self._step(tokens)

    def log_sum_exps(self, logits: Tensor) -> Tensor:
        """Returns the log-sum-exps [rows] in fp32 of logits [rows, padded vocab] that a method of this object has
        returned. No communication."""
        return log_sum_exps(logits, self._build)

    def remove(self, row: int) -> None:
        """Removes a row. The last row moves to its position."""
        self._tell(_REMOVE, [row])
        self._remove(row)

    def idle(self) -> None:
        """Does nothing but show all ranks that the others are alive. Raises CommError if one is not."""
        self._tell(_IDLE)

    @torch.inference_mode()
    def accompany(self) -> bool:
        """Takes part in the next forward of the replicas with which this one shares experts. Returns False when all of
        them have ended, at once where no experts are shared."""
        if not self._shares_experts:
            return False
        self._tell(_ACCOMPANY)
        return self._accompany()

    def close(self) -> None:
        """Ends `follow` on all other ranks."""
        self._tell(_CLOSE)

    @torch.inference_mode()
    def follow(self) -> None:
        """Executes the commands of the first rank on every other rank, until it closes."""
        ranks, header = self._groups.model, torch.empty(2, dtype=torch.int64, device=self._device)
        while True:
            action, count = broadcast(header, ranks).tolist()
            numbers: list[int] = []
            if count:
                numbers = broadcast(torch.empty(count, dtype=torch.int64, device=self._device), ranks).tolist()
            if action == _READ:
                prompts = _unflat(numbers)
                self._next_logits(self._read(prompts), len(prompts))
            elif action == _READ_SCORED:
                top, candidates, *flat = numbers
                self._read_scored(_unflat(flat), top, candidates)
            elif action == _STEP:
                self._step(numbers)
            elif action == _REMOVE:
                self._remove(numbers[0])
            elif action == _ACCOMPANY:
                self._accompany()
            elif action == _CLOSE:
                return

    def _tell(self, action: int, numbers: Sequence[int] = ()) -> None:
        ranks = self._groups.model
        if ranks.size > 1:
            broadcast(torch.tensor([action, len(numbers)], device=self._device), ranks)
            if numbers:
                broadcast(torch.tensor(list(numbers), device=self._device), ranks)

    @property
    def _lengths(self) -> list[int]:
        return [len(sequence) for sequence in self._sequences]

    def _read(self, prompts: Sequence[Sequence[int]]) -> Tensor | None:
        """Returns the input of the head [longest, prompts, h] on the last stage; each prompt ends in its last
        column."""
        first, lengths = len(self._sequences), [len(prompt) for prompt in prompts]
        rows = slice(first, first + len(prompts))
        assert rows.stop <= self.slots, f"{len(prompts)} prompts for {self.slots - first} rows"
        assert min(lengths) > 0 and max(lengths) <= self.capacity, f"{lengths} tokens for {self.capacity} columns"
        if max(lengths) > self._end:
            self._move_columns(max(lengths) - self._end)
        self._sequences += [list(prompt) for prompt in prompts]
        self._numbers += range(self._read_sequences, self._read_sequences + len(prompts))
        self._read_sequences += len(prompts)
        return self._fill(rows)

    def _fill(self, rows: slice, next_tokens: int = 0) -> Tensor | None:
        """Computes the keys and values of the rows' tokens; returns what `_read` does.

        `next_tokens` more tokens of each row will be read; see [Note: outgrown frequencies].
        """
        sequences, place = self._sequences[rows], self._place
        longest = max(len(sequence) for sequence in sequences)
        padding = torch.tensor([[longest - len(sequence)] for sequence in sequences])  # [rows, 1]
        columns = torch.arange(longest)
        segments = None
        if padding.any():  # see [Note: prompts of different lengths]
            is_padding = columns < padding  # [rows, longest]
            segments = segments_of((~is_padding).long(), self._device)
            place.padding = is_padding.t().to(self._device)
        padded = [[0] * (longest - len(sequence)) + sequence for sequence in sequences]
        place.rows = rows
        place.new = place.seen = slice(self._end - longest, self._end)
        hidden = self._hidden(
            torch.tensor(padded, device=self._device),
            (columns - padding).clamp(min=0).to(self._device),
            segments,
            (longest - padding + next_tokens).to(self._device),
        )
        place.padding = None
        return hidden

    def _hidden(self, tokens: Tensor, positions: Tensor, segments: Segments | None, lengths: Tensor) -> Tensor | None:
        """Runs a forward of tokens [rows, new columns] at the place that has been set."""
        routing = None if self._chosen is None else self._chosen.routing(tokens.shape[1])
        self._meet(1)
        hidden = self._model.hidden(tokens, positions, segments, self._caches, lengths=lengths, routing=routing)
        if self._chosen is not None and routing is not None:
            self._chosen.append(routing)
        return hidden

    def _read_scored(
        self, prompts: Sequence[Sequence[int]], top: int, candidates: int
    ) -> tuple[Tensor, list[Logprobs]]:
        hidden, packed = self._read(prompts), None
        counts = [len(prompt) - 1 for prompt in prompts]
        scores = torch.empty(1 + 2 * min(top, candidates), sum(counts))
        if sum(counts):  # else there is nothing to score, and nothing to send
            if hidden is not None:
                before = [hidden[-1 - count : -1, row] for row, count in enumerate(counts)]
                tokens = [token for prompt in prompts for token in prompt[1:]]
                chosen = torch.tensor(tokens, device=self._device, dtype=torch.int64)
                packed = token_logprobs(
                    self._model, self._build, torch.cat(before), chosen, top=top, candidates=candidates
                ).packed()
            scores = self._model.share(packed, tuple(scores.shape), torch.float32)
        by_prompt = [Logprobs.unpack(part) for part in scores.split(counts, dim=1)]
        return self._next_logits(hidden, len(prompts)), by_prompt

    def _step(self, tokens: Sequence[int]) -> Tensor:
        rows, lengths = len(self._sequences), self._lengths
        assert len(tokens) == rows > 0, f"{len(tokens)} tokens for {rows} rows"
        if self._end == self.capacity:
            self._move_columns(max(lengths) - self._end)
        assert self._end < self.capacity, f"a row has reached the cache's {self.capacity} columns"
        for row, length in enumerate(lengths):
            if length == self._short:  # see [Note: outgrown frequencies]
                self._fill(slice(row, row + 1), next_tokens=1)
        positions = torch.tensor(lengths, device=self._device).unsqueeze(1)  # [rows, 1]
        first = self._end - max(lengths)
        segments = None
        if min(lengths) < max(lengths):
            columns = torch.arange(first, self._end + 1, device=self._device)
            segments = Segments((columns >= self._end - positions).long())  # of [rows, columns that are seen]
        self._place.rows, self._place.new = slice(0, rows), slice(self._end, self._end + 1)
        self._place.seen = slice(first, self._end + 1)
        self._end += 1
        for sequence, token in zip(self._sequences, tokens, strict=True):
            sequence.append(token)
        new = torch.tensor(tokens, device=self._device).unsqueeze(1)
        hidden = self._hidden(new, positions, segments, positions + 1)
        return self._next_logits(hidden, rows)

    def _meet(self, forwards: int) -> int:
        """Returns how many of the ranks that share experts run a forward now."""
        if not self._shares_experts:
            return forwards
        return int(all_reduce(torch.tensor([forwards], device=self._device), self._groups.etp_ep))

    def _accompany(self) -> bool:
        if not self._meet(0):
            return False
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        self._next_logits(self._model.hidden(nothing, nothing), 1)
        return True

    def _next_logits(self, hidden: Tensor | None, rows: int) -> Tensor:
        return all_gather(self._model.next_logits(hidden, rows).t(), self._groups.tp).t()

    def _remove(self, row: int) -> None:
        last = len(self._sequences) - 1
        if self._chosen is not None:
            used = slice(self._end - len(self._sequences[row]), self._end)
            self.experts[self._numbers[row]] = self._chosen.of_row(row, used)
        for columns in self._columns:
            columns.move_row(last, row, self._used())
        self._sequences[row], self._numbers[row] = self._sequences[last], self._numbers[last]
        self._sequences.pop()
        self._numbers.pop()

    def _move_columns(self, by: int) -> None:
        for columns in self._columns:
            columns.move_columns(len(self._sequences), self._used(), by)
        self._end += by

    def _used(self) -> slice:
        return slice(self._end - max(self._lengths, default=0), self._end)


def check_room(
    model: GPTModel,
    build: Build,
    *,
    slots: int,
    capacity: int,
    batch_flag: str = "--max-batch-size",
    length_flag: str = "--max-sequence-length",
) -> None:
    """Raises ConfigError, on the rank that finds it, if the cache of a decoder does not fit on the device.

    batch_flag, length_flag: the flags that size it.
    """
    tp, cores = build.groups.tp.size, StagedModel(model, build).cached
    size = slots * sum(core.cache_bytes(tp, capacity, build.dtype.itemsize) for core in cores)
    if size > (free := headroom(build.device)):
        fewer = slots * free // size
        fix = f"give {batch_flag} {fewer} or less, or lower {length_flag}" if fewer else f"lower {length_flag}"
        raise ConfigError(
            f"the cache of {slots} requests of {capacity} tokens takes {size / 1e9:.1f} GB and there are "
            f"{free / 1e9:.1f} GB; {fix}"
        )


def _flat(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Returns the number of prompts, the length of each, and all their tokens."""
    lengths = [len(prompt) for prompt in prompts]
    return [len(prompts), *lengths, *(token for prompt in prompts for token in prompt)]


def _unflat(numbers: Sequence[int]) -> list[list[int]]:
    """Inverse of `_flat`."""
    count, *values = numbers
    prompts, start = [], count
    for length in values[:count]:
        prompts.append(list(values[start : start + length]))
        start += length
    return prompts
