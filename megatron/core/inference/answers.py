"""The OpenAI API's answers: JSON objects made of an engine's pieces, whole or in chunks."""

from __future__ import annotations

import functools
import itertools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.inference.engine import Piece, ScoredToken

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's API and vLLM write this in its place


@dataclass(frozen=True)
class Echo:
    """A choice's prompt, where it is echoed: its text, and what is read before it and is no part of it (the bos)."""

    text: str = ""
    before: tuple[int, ...] = ()


@dataclass
class Answer:
    """One choice: the pieces of a request, joined."""

    text: str = ""
    prompt: list[ScoredToken] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    count: int = 0
    reason: str | None = None

    def add(self, piece: Piece) -> None:
        """The next piece."""
        self.text += piece.text
        self.prompt += piece.prompt
        self.tokens += piece.tokens
        self.count, self.reason = piece.count, piece.reason


class AnswerFormat(Protocol):
    """What a route answers with."""

    def whole(self, answers: Sequence[Answer], prompt_tokens: int) -> dict[str, Any]:
        """The answer when it is not streamed."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before the first token of choice `index`, if there is one."""
        ...

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """The next chunk of choice `index`."""
        ...

    def usage_chunk(self, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
        """The last chunk, where it is asked for."""
        ...


class CompletionFormat:
    """/v1/completions."""

    def __init__(self, model: str, tokenizer: Tokenizer, echoes: Sequence[Echo], logprobs: bool) -> None:
        """`echoes`: for each choice. With `logprobs` the tokens of what is echoed are reported, too."""
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self._head["model"] = model
        self._text = functools.cache(lambda token: tokenizer.decode([token]))
        self._echoes, self._logprobs = echoes, logprobs
        self._offsets = [len(echo.text) for echo in echoes]  # where each choice's next token begins in its text

    def whole(self, answers: Sequence[Answer], prompt_tokens: int) -> dict[str, Any]:
        """See AnswerFormat."""
        choices = [
            self._choice(index, self._echoes[index].text + answer.text, answer.prompt, answer.tokens, answer.reason)
            for index, answer in enumerate(answers)
        ]
        return {**self._head, "choices": choices, "usage": usage(prompt_tokens, sum(a.count for a in answers))}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The echo, unless it comes with log-probabilities, which are not known yet."""
        echo = "" if self._logprobs else self._echoes[index].text
        return {**self._head, "choices": [self._choice(index, echo, (), (), None)]} if echo else None

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """See AnswerFormat."""
        text = self._echoes[index].text + piece.text if piece.prompt else piece.text
        return {**self._head, "choices": [self._choice(index, text, piece.prompt, piece.tokens, piece.reason)]}

    def usage_chunk(self, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
        """See AnswerFormat."""
        return {**self._head, "choices": [], "usage": usage(prompt_tokens, new_tokens)}

    def _choice(
        self, index: int, text: str, prompt: Sequence[ScoredToken], tokens: Sequence[ScoredToken], reason: str | None
    ) -> dict[str, Any]:
        logprobs = self._report(index, prompt, tokens) if self._logprobs and (prompt or tokens) else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _report(self, index: int, prompt: Sequence[ScoredToken], tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """New tokens lie behind the echo, whatever the texts of its tokens add up to."""
        echo, both = self._echoes[index], [*prompt, *tokens]
        echoed, _ = self._places(prompt, -sum(len(self._text(token)) for token in echo.before))
        new, self._offsets[index] = self._places(tokens, self._offsets[index])
        return {
            "tokens": [self._text(token.id) for token in both],
            "token_logprobs": [None if token.logprob is None else _in_json(token.logprob) for token in both],
            "top_logprobs": [None if token.logprob is None else self._top(token, token.logprob) for token in both],
            "text_offset": [*echoed, *new],
        }

    def _places(self, tokens: Sequence[ScoredToken], start: int) -> tuple[list[int], int]:
        """Where each begins when they stand one after another from `start` on, and where they end."""
        ends = list(itertools.accumulate((len(self._text(token.id)) for token in tokens), initial=start))
        return [max(0, place) for place in ends[:-1]], ends[-1]

    def _top(self, token: ScoredToken, logprob: float) -> dict[str, float]:
        """By text; of tokens with the same text the likeliest. The token itself is always there, as in OpenAI's API."""
        found: dict[str, float] = {}
        for i, value in (*token.top, (token.id, logprob)):
            found.setdefault(self._text(i), _in_json(value))
        return found


class ChatFormat:
    """/v1/chat/completions."""

    def __init__(self, model: str, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._text, self._logprobs = functools.cache(lambda token: tokenizer.decode([token])), logprobs

    def whole(self, answers: Sequence[Answer], prompt_tokens: int) -> dict[str, Any]:
        """See AnswerFormat."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text},
                "logprobs": self._report(answer.tokens),
                "finish_reason": answer.reason,
            }
            for index, answer in enumerate(answers)
        ]
        counts = usage(prompt_tokens, sum(answer.count for answer in answers))
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": counts}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Who speaks."""
        return self._chunk(index, {"role": "assistant", "content": ""}, (), None)

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """See AnswerFormat."""
        return self._chunk(index, {"content": piece.text} if piece.text else {}, piece.tokens, piece.reason)

    def usage_chunk(self, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
        """See AnswerFormat."""
        counts = usage(prompt_tokens, new_tokens)
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": counts}

    def _chunk(
        self, index: int, delta: dict[str, Any], tokens: Sequence[ScoredToken], reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": self._report(tokens), "finish_reason": reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _report(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            {**self._entry(token.id, token.logprob), "top_logprobs": [self._entry(*pair) for pair in token.top]}
            for token in tokens
            if token.logprob is not None
        ]
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        # A part of a character decodes to the mark for "no character", whose bytes would mislead.
        return {"token": text, "logprob": _in_json(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}


def _in_json(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """Token counts. A prompt counts once, however many choices it has; what ended a choice counts too."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }
