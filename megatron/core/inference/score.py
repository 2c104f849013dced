"""Log-likelihoods of given tokens, and the perplexity of texts.

[Note: sliding windows]
A document longer than the context is read in windows of `context` tokens that begin `stride` tokens apart. The first
window scores all its tokens, each later one its last `stride`, so every token is scored once and, except in the first
window, after at least context - stride others. The document's first token is scored after the tokenizer's bos, or its
eod if it has no bos. Totals are sums over tokens, not means over windows or documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.base.errors import CheckpointError, DataError
from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.inference.engine.logprobs import token_logprobs
from megatron.core.inference.engine.staged import StagedModel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.context import Build

_AHEAD = 4  # batches per pipeline rank between two synchronizations, whose wait is then at most a fifth of the time


@dataclass(frozen=True)
class Window:
    """Tokens of which the last `scored` are predicted from all before them; the very last one is not an input."""

    ids: Sequence[int]
    scored: int


@dataclass(frozen=True)
class Score:
    """The summed natural log-probability of a window's scored tokens, and whether each was the likeliest."""

    logprob: float
    greedy: bool


@dataclass(frozen=True)
class TextScore:
    """Totals over texts. `nats`: negative sum of the log-probabilities of all tokens; `bytes`: size of the texts in
    UTF-8.
    """

    documents: int
    tokens: int
    bytes: int
    nats: float

    @property
    def loss(self) -> float:
        """Loss in nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Perplexity per token; infinite if it overflows a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text. It does not depend on the tokenizer, so models with different ones can be compared."""
        return self.nats / math.log(2) / self.bytes


def score_texts(
    model: GPTModel,
    build: Build,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    *,
    context: int,
    stride: int,
    batch_tokens: int,
) -> TextScore:
    """Scores documents (see [Note: sliding windows]), which may come from a stream. Empty ones are skipped.

    Collective over tp x pp, where every rank passes the same texts. Raises DataError if there is no text,
    CheckpointError for logits that are not finite.
    """
    assert 0 < stride <= context, f"stride {stride} for a context of {context}"
    first = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
    documents = tokens = size = 0
    nats = 0.0
    held: list[Window] = []

    def flush() -> float:
        return -math.fsum(text_score.logprob for text_score in score(model, build, held, batch_tokens))

    for text in texts:
        ids = tokenizer.encode(text)
        if not ids:
            continue
        documents, tokens, size = documents + 1, tokens + len(ids), size + len(text.encode())
        for window in sliding_windows([first, *ids], context, stride):
            held.append(window)
            if len(held) * context >= 16 * batch_tokens:  # enough to sort by length, and less than a whole file
                nats += flush()
                held.clear()
    if held:
        nats += flush()
    if not documents:
        raise DataError("there is no text to score")
    return TextScore(documents, tokens, size, nats)


def sliding_windows(ids: Sequence[int], context: int, stride: int) -> Iterator[Window]:
    """Yields windows that score each of ids[1:] once (see [Note: sliding windows])."""
    done = 1
    while done < len(ids):
        end = min(len(ids), done + (context if done == 1 else stride))
        yield Window(ids[max(0, end - context - 1) : end], end - done)
        done = end


@torch.inference_mode()
def score(model: GPTModel, build: Build, windows: Sequence[Window], batch_tokens: int) -> list[Score]:
    """Returns one score per window, in order; windows of similar length are read together, `batch_tokens` positions at
    a time.

    Shorter windows are padded on the right, after everything that is scored: no token attends to padding, and no mask
    is needed. Communication: StagedModel's, an all-gather over tp of five numbers per scored position and, once per
    several batches, a broadcast over pp of two numbers per scored position.
    """
    staged, batches = StagedModel(model, build), _batches(windows, batch_tokens)
    scores: dict[int, Score] = {}
    together = _AHEAD * build.groups.pp.size
    for first in range(0, len(batches), together):
        chunk = batches[first : first + together]
        parts = [_read(staged, build, [windows[number] for number in batch]) for batch in chunk]
        numbers = [number for batch in chunk for number in batch]
        values = torch.cat([part for part in parts if part is not None], dim=1) if parts[0] is not None else None
        shape = (2, sum(windows[number].scored for number in numbers))
        logprobs, likeliest = staged.share(values, shape, torch.float32).tolist()
        if not all(map(math.isfinite, logprobs)):
            raise CheckpointError(
                "the model's logits are not finite: its weights are damaged or have diverged, or overflow in "
                f"{build.config.dtype_name}; try an earlier checkpoint with --ckpt-step"
            )
        start = 0
        for number in numbers:
            stop = start + windows[number].scored
            scores[number] = Score(math.fsum(logprobs[start:stop]), all(likeliest[start:stop]))
            start = stop
    return [scores[number] for number in range(len(windows))]


def _batches(windows: Sequence[Window], batch_tokens: int) -> list[list[int]]:
    """Returns the numbers of the windows that are read together, the longest first."""
    order, batches = sorted(range(len(windows)), key=lambda i: -len(windows[i].ids)), []
    while order:
        size = max(1, batch_tokens // (len(windows[order[0]].ids) - 1))
        batches.append(order[:size])
        order = order[size:]
    return batches


def _read(staged: StagedModel, build: Build, windows: Sequence[Window]) -> Tensor | None:
    """Returns [2, n]: log-probability of the n scored positions, and 1 for the likeliest token; None before the last
    stage.
    """
    device, longest = build.device, max(len(window.ids) for window in windows) - 1
    padded = [[*window.ids[:-1], *[0] * (longest + 1 - len(window.ids))] for window in windows]
    positions = torch.arange(longest, device=device).unsqueeze(0)
    lengths = torch.tensor([[len(window.ids) - 1] for window in windows], device=device)
    hidden = staged.hidden(torch.tensor(padded, device=device), positions, lengths=lengths)  # [s, b, h]
    if hidden is None:
        return None
    columns = [len(window.ids) - 1 - window.scored + i for window in windows for i in range(window.scored)]
    rows = [row for row, window in enumerate(windows) for _ in range(window.scored)]
    targets = torch.tensor([i for window in windows for i in window.ids[-window.scored :]], device=device)
    read = hidden[torch.tensor(columns, device=device), torch.tensor(rows, device=device)]  # [n, h]
    assert build.config.vocab_size
    logprobs = token_logprobs(staged, build, read, targets, top=1, candidates=build.config.vocab_size)
    return torch.stack([logprobs.chosen, (logprobs.ids[0] == targets).float()])
