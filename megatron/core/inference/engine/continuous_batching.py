"""Continuous batching: requests wait in a queue, join the running batch when a row is free, and leave when they end.

One thread owns the engine and the model and executes `run`, or `step` until it is idle; any thread may call `submit`
and `cancel`. Answers are passed to a callback of the request, on the engine's thread, as they are generated.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron.base.errors import MegatronError
from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.inference.engine.logprobs import Logprobs
from megatron.core.inference.engine.penalties import NO_PENALTIES, LogitChanges, Penalties
from megatron.core.inference.engine.sampling import Draws, Sampling, choose
from megatron.core.inference.engine.slots import SlotDecoder
from megatron.core.inference.engine.text import TextStream
from megatron.spec.work_space import PROMPT_TOKENS

IDLE_SECONDS = 0.5  # between two signals to the other ranks while there is no request
_NOT_FINITE = "the model's logits are not finite: its weights are damaged, or they overflow"


class QueueFull(MegatronError):
    """The queue of waiting requests is full."""


class EngineStopped(MegatronError):
    """The engine accepts no more requests: it was stopped, or has failed."""


@dataclass(frozen=True)
class ScoredToken:
    """A token, its log-probability and those of the likeliest tokens, in that order.

    Log-probabilities are natural, before temperature and truncation. Probabilities are over all ids that the model
    knows; `top` lists only ids that the tokenizer knows, because only these are ever chosen. The first token of a
    prompt has no logprob and no top. `place` is where the text of a new token begins in the answer.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    place: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """The progress of a request. The last output has a reason: "stop", "length" or "error"; `error` then has details.

    `count` is the number of new tokens so far, including the one that ended it. `tokens`, if requested, are the new
    ones since the last output. `prompt`, if requested, holds all tokens of the prompt, once, before any new one. `ids`,
    in the last output, are all new tokens.
    """

    text: str
    count: int
    tokens: tuple[ScoredToken, ...] = ()
    reason: str | None = None
    error: str = ""
    prompt: tuple[ScoredToken, ...] = ()
    ids: tuple[int, ...] = ()


@dataclass(eq=False, kw_only=True)
class Request:
    """A prompt to continue, and the callback that receives its outputs.

    With `max_new_tokens` 0 the prompt is only read. `top_logprobs` is the number of likeliest tokens to report, or None
    for no log-probabilities; `score_prompt` also reports those of the prompt's tokens. `stop_ids` end the sequence, as
    the model's own ends do unless `ignores_ends`; none of them, and no stop string, ends it before `min_tokens` tokens.
    `keeps_stop`: the text has the stop that ended it. `shows_special`: it has special tokens, spelled out; otherwise
    only those in `shown_ids`.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    on_output: Callable[[RequestOutput], None]
    stop_strings: Sequence[str] = ()
    stop_ids: Collection[int] = ()
    ignores_ends: bool = False
    min_tokens: int = 0
    keeps_stop: bool = False
    shows_special: bool = False
    shown_ids: Collection[int] = ()
    penalties: Penalties = NO_PENALTIES
    top_logprobs: int | None = None
    score_prompt: bool = False
    cancelled: bool = field(default=False, init=False)

    @property
    def scores(self) -> int | None:
        """The number of likeliest tokens to report at each token of the prompt, or None if these are not scored."""
        return self.top_logprobs if self.score_prompt else None

    def cancel(self) -> None:
        """Cancels the request: its row is free from the next step on. Any thread may call this, also after the
        request's end.
        """
        self.cancelled = True


class _Row:
    """A running request."""

    def __init__(self, request: Request, tokenizer: Tokenizer, stop_ids: Collection[int]) -> None:
        self.request = request
        self.draws = None if request.sampling.greedy else Draws([request.seed])
        self.ended = False
        ends = {*request.stop_ids, *(() if request.ignores_ends else stop_ids)}
        self.changes = LogitChanges(request.penalties, request.prompt, min_tokens=request.min_tokens, ends=ends)
        self._stream = TextStream(
            tokenizer,
            request.prompt,
            ends,
            request.stop_strings,
            hidden_ids=() if request.shows_special else tokenizer.special_ids.difference(request.shown_ids),
            keeps_stop=request.keeps_stop,
            min_tokens=request.min_tokens,
        )

    @property
    def last(self) -> int:
        return self._stream.ids[-1]

    def begin(self, prompt: tuple[ScoredToken, ...]) -> None:
        """Reports that the prompt has been read."""
        self.ended = self.request.max_new_tokens == 0
        if self.ended:
            self._stream.close()  # with the character that the prompt ends in
        if prompt or self.ended:
            reason = "length" if self.ended else None
            self.request.on_output(RequestOutput(self._stream.take(), 0, (), reason, prompt=prompt))

    def push(self, token: int, chosen: tuple[ScoredToken, ...]) -> None:
        """Adds the next token and reports the text that has become final."""
        stream = self._stream
        self.changes.add(token)
        self.ended = stream.push(token) or len(stream.ids) == self.request.max_new_tokens
        chosen = tuple(replace(score, place=stream.place) for score in chosen)
        if self.ended:
            stream.close()
        text = stream.take()
        if text or chosen or self.ended:
            reason, ids = (stream.reason, tuple(stream.ids)) if self.ended else (None, ())
            self.request.on_output(RequestOutput(text, len(stream.ids), chosen, reason, ids=ids))

    def fail(self, error: str) -> None:
        self.ended = True
        self.request.on_output(RequestOutput("", len(self._stream.ids), (), "error", error))


class InferenceEngine:
    """Runs requests and reports outputs. A prompt has the same answer, greedy or seeded, whatever else runs.

    It executes on the first rank of tp x pp, and the others execute `follow` of the decoder.
    """

    def __init__(
        self, decoder: SlotDecoder, tokenizer: Tokenizer, *, max_waiting: int, stop_ids: Collection[int] = ()
    ) -> None:
        """`stop_ids` are tokens that end a sequence in addition to the tokenizer's eod."""
        self.failure: Exception | None = None  # the error that ended `run`, if any
        self.max_waiting, self.max_tokens = max_waiting, decoder.capacity
        self._decoder, self._tokenizer = decoder, tokenizer
        self._stop_ids = frozenset({tokenizer.eod, *stop_ids})
        self._rows: list[_Row] = []  # in the order of the decoder's rows
        self._waiting: deque[Request] = deque()
        self._changed = threading.Condition()  # held to access _waiting and _stopping
        self._stopping = False

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues all requests, or none. Raises QueueFull and EngineStopped. Any thread may call this."""
        for request in requests:
            total = len(request.prompt) + request.max_new_tokens
            assert request.prompt and request.max_new_tokens >= 0 and total <= self.max_tokens, f"{total} tokens"
        with self._changed:
            if self._stopping:
                raise EngineStopped("the server is shutting down")
            self._waiting = deque(request for request in self._waiting if not request.cancelled)
            if len(self._waiting) + len(requests) > self.max_waiting:
                raise QueueFull(f"{len(self._waiting)} requests are waiting; try again later")
            self._waiting.extend(requests)
            self._changed.notify()

    def load(self) -> tuple[int, int]:
        """Returns (running requests, waiting requests). Any thread may call this."""
        return len(self._rows), len(self._waiting)

    def stop(self) -> None:
        """Makes `run` return after its current step; unfinished requests then fail. Any thread may call this."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def run(self) -> None:
        """Serves until `stop`, or until an error, which is then stored in `failure`. Every request gets its last
        output."""
        try:
            while self._wait():
                if not self.step():
                    self._decoder.idle()
            self._decoder.close()
        except Exception as error:  # a lost rank, a full device or any other error: no request may wait forever
            self.failure = error
        why = f"the engine failed: {self.failure}" if self.failure else "the server is shutting down"
        with self._changed:
            self._stopping = True
            left, self._waiting = list(self._waiting), deque()
        for row in self._rows:
            row.fail(why)
        for request in left:
            request.on_output(RequestOutput("", 0, (), "error", why))

    @torch.inference_mode()
    def step(self) -> bool:
        """Removes ended requests, adds waiting ones, then generates one token per running request. Returns False if
        idle.
        """
        for row in self._rows:
            row.ended = row.ended or row.request.cancelled
        self._remove_ended()
        joined, running = self._join(), bool(self._rows)
        if running:
            self._push(self._rows, self._decoder.step([row.last for row in self._rows]))
            self._remove_ended()
        return joined or running

    def _wait(self) -> bool:
        """Returns when there is work or the other ranks need a signal; False to end."""
        with self._changed:
            if not (self._stopping or self._rows or self._waiting):
                self._changed.wait(IDLE_SECONDS)
            return not self._stopping

    def _join(self) -> bool:
        read = 0
        while len(self._rows) < self._decoder.slots and read < PROMPT_TOKENS:
            requests = self._next_waiting(PROMPT_TOKENS - read)
            if not requests:
                break
            rows = [_Row(request, self._tokenizer, self._stop_ids) for request in requests]
            self._rows += rows
            logits, prompts = self._read(requests)
            for row, prompt in zip(rows, prompts, strict=True):
                if any(token.logprob is not None and math.isnan(token.logprob) for token in prompt):
                    row.fail(_NOT_FINITE)
                else:
                    row.begin(prompt)
            self._push(rows, logits)
            self._remove_ended()
            read += len(requests) * max(len(request.prompt) for request in requests)
        return read > 0

    def _read(self, requests: Sequence[Request]) -> tuple[Tensor, list[tuple[ScoredToken, ...]]]:
        """Returns the logits after the prompts, and the scores of their tokens if they are requested."""
        prompts, top = [request.prompt for request in requests], requests[0].scores
        if top is None:
            return self._decoder.read(prompts), [() for _ in prompts]
        logits, scores = self._decoder.read_scored(prompts, top, self._tokenizer.vocab_size)
        return logits, [_scored(prompt, part) for prompt, part in zip(prompts, scores, strict=True)]

    def _next_waiting(self, tokens: int) -> list[Request]:
        """Takes requests from the front of the queue whose prompts are read together: up to the free rows, up to this
        many tokens with their padding (or one prompt), and scored alike.
        """
        free, requests, longest = self._decoder.slots - len(self._rows), list[Request](), 0
        with self._changed:
            while self._waiting and len(requests) < free:
                request = self._waiting[0]
                if not request.cancelled:
                    longest = max(longest, len(request.prompt))
                    too_many = (len(requests) + 1) * longest > tokens
                    if requests and (too_many or request.scores != requests[0].scores):
                        break
                    requests.append(request)
                self._waiting.popleft()
        return requests

    def _push(self, rows: Sequence[_Row], logits: Tensor) -> None:
        """Chooses the next token of each row that has not ended from logits [rows, padded vocab]."""
        scored = any(row.request.top_logprobs is not None for row in rows)
        sums = self._decoder.log_sum_exps(logits) if scored else logits.new_zeros(len(rows), dtype=torch.float32)
        logits = logits[:, : self._decoder.vocab_size]
        for row, is_finite in zip(rows, logits.isfinite().all(dim=-1).tolist(), strict=True):
            if not (is_finite or row.ended):
                row.fail(_NOT_FINITE)
        if any(row.ended for row in rows):
            running = [number for number, row in enumerate(rows) if not row.ended]
            logits, sums = logits[running], sums[running]
            rows = [row for row in rows if not row.ended]
        candidates = self._tokenizer.vocab_size  # the model may know more ids, which have no text
        for number, (row, token) in enumerate(zip(rows, _choose(rows, logits[:, :candidates]), strict=True)):
            count = row.request.top_logprobs
            scores = () if count is None else (_report(logits[number], sums[number], token, count, candidates),)
            row.push(token, scores)

    def _remove_ended(self) -> None:
        for number in reversed(range(len(self._rows))):
            if self._rows[number].ended:
                self._decoder.remove(number)
                self._rows[number] = self._rows[-1]
                self._rows.pop()


def _choose(rows: Sequence[_Row], logits: Tensor) -> list[int]:
    """Returns the next token of each row. Rows with equal sampling settings are chosen together."""
    alike: dict[Sampling, list[int]] = {}
    if any(row.changes.is_needed for row in rows):
        pairs = zip(rows, logits, strict=True)
        logits = torch.stack(
            [
                row.changes.changed(row_logits) if row.changes.is_needed else row_logits.float()
                for row, row_logits in pairs
            ]
        )
    for number, row in enumerate(rows):
        alike.setdefault(row.request.sampling, []).append(number)
    ids = [0] * len(rows)
    for sampling, numbers in alike.items():
        drawn = [draws.next() for number in numbers if (draws := rows[number].draws) is not None]
        chosen = choose(logits[numbers], sampling, torch.cat(drawn).to(logits.device) if drawn else None)
        for number, token in zip(numbers, chosen.tolist(), strict=True):
            ids[number] = token
    return ids


def _scored(prompt: Sequence[int], scores: Logprobs) -> tuple[ScoredToken, ...]:
    """Returns the tokens of a prompt with their scores, of which the first has none."""
    ids, values = scores.ids.t().int().tolist(), scores.values.t().tolist()
    columns = zip(prompt[1:], scores.chosen.tolist(), ids, values, strict=True)
    tokens = [ScoredToken(token, logprob, tuple(zip(*top, strict=True))) for token, logprob, *top in columns]
    return (ScoredToken(prompt[0]), *tokens)


def _report(logits: Tensor, log_sum_exp: Tensor, token: int, count: int, candidates: int) -> ScoredToken:
    logprobs = logits.float() - log_sum_exp
    values, ids = logprobs[:candidates].topk(min(count, candidates))
    return ScoredToken(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
