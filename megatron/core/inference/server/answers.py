"""The OpenAI API's answers: JSON objects built from an engine's outputs, complete or in chunks."""

from __future__ import annotations

import functools
import time
import uuid
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.inference.engine.continuous_batching import RequestOutput, ScoredToken
from megatron.core.inference.engine.text import token_places
from megatron.core.inference.server.tool_calls import ToolCallReader

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's API and vLLM write this in its place


@dataclass(frozen=True)
class Echo:
    """The prompt of a choice that is echoed: its text, and the tokens read before it that are not part of it (the
    bos)."""

    text: str = ""
    before: tuple[int, ...] = ()


@dataclass
class Answer:
    """One choice: the joined outputs of a request."""

    text: str = ""
    prompt: list[ScoredToken] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    count: int = 0
    reason: str | None = None

    def add(self, output: RequestOutput) -> None:
        """Appends the next output."""
        self.text += output.text
        self.prompt += output.prompt
        self.tokens += output.tokens
        self.count, self.reason = output.count, output.reason


class AnswerFormat(Protocol):
    """The format of a route's answers."""

    def whole(self, answers: Sequence[Answer], prompt_tokens: int) -> dict[str, Any]:
        """Returns the complete answer, for a request without streaming."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """Returns the chunk before the first token of choice `index`, or None."""
        ...

    def chunk(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """Returns the next chunk of choice `index`."""
        ...

    def usage_chunk(self, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
        """Returns the last chunk, with token counts, for clients that request it."""
        ...


class CompletionFormat:
    """The answers of /v1/completions."""

    def __init__(self, model: str, tokenizer: Tokenizer, echoes: Sequence[Echo], logprobs: bool) -> None:
        """`echoes` has one entry per choice. With `logprobs` the tokens of the echoed prompts are reported, too."""
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self._head["model"] = model
        self._text = functools.cache(lambda token: tokenizer.decode([token]))
        self._echoes, self._logprobs, self._tokenizer = echoes, logprobs, tokenizer

    def whole(self, answers: Sequence[Answer], prompt_tokens: int) -> dict[str, Any]:
        """See AnswerFormat."""
        choices = [
            self._choice(index, self._echoes[index].text + answer.text, answer.prompt, answer.tokens, answer.reason)
            for index, answer in enumerate(answers)
        ]
        return {**self._head, "choices": choices, "usage": usage(prompt_tokens, sum(a.count for a in answers))}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Returns the echo, unless it has log-probabilities, which are not known yet."""
        echo = "" if self._logprobs else self._echoes[index].text
        return {**self._head, "choices": [self._choice(index, echo, (), (), None)]} if echo else None

    def chunk(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """See AnswerFormat."""
        text = self._echoes[index].text + output.text if output.prompt else output.text
        return {**self._head, "choices": [self._choice(index, text, output.prompt, output.tokens, output.reason)]}

    def usage_chunk(self, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
        """See AnswerFormat."""
        return {**self._head, "choices": [], "usage": usage(prompt_tokens, new_tokens)}

    def _choice(
        self, index: int, text: str, prompt: Sequence[ScoredToken], tokens: Sequence[ScoredToken], reason: str | None
    ) -> dict[str, Any]:
        logprobs = self._report(index, prompt, tokens) if self._logprobs and (prompt or tokens) else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _report(self, index: int, prompt: Sequence[ScoredToken], tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """Positions of new tokens are those after the echo, whose length may differ from the sum of its tokens'
        texts."""
        echo, both = self._echoes[index], [*prompt, *tokens]
        before = sum(len(self._text(token)) for token in echo.before)
        echoed = [max(0, place - before) for place in token_places(self._tokenizer, [token.id for token in prompt])]
        return {
            "tokens": [self._text(token.id) for token in both],
            "token_logprobs": [None if token.logprob is None else _in_json(token.logprob) for token in both],
            "top_logprobs": [None if token.logprob is None else self._top(token, token.logprob) for token in both],
            "text_offset": [*echoed, *(len(echo.text) + token.place for token in tokens)],
        }

    def _top(self, token: ScoredToken, logprob: float) -> dict[str, float]:
        """Returns log-probabilities by text; of tokens with equal text the likeliest. As in OpenAI's API, `token` is
        included.
        """
        logprobs: dict[str, float] = {}
        for i, value in (*token.top, (token.id, logprob)):
            logprobs.setdefault(self._text(i), _in_json(value))
        return logprobs


class ChatFormat:
    """The answers of /v1/chat/completions."""

    def __init__(self, model: str, tokenizer: Tokenizer, logprobs: bool, tools: Collection[str] = ()) -> None:
        """tools: names of functions; calls of them in an answer's text are reported as such."""
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._text, self._logprobs = functools.cache(lambda token: tokenizer.decode([token])), logprobs
        self._tools = frozenset(tools)
        self._readers: defaultdict[int, ToolCallReader] = defaultdict(lambda: ToolCallReader(self._tools))

    def whole(self, answers: Sequence[Answer], prompt_tokens: int) -> dict[str, Any]:
        """See AnswerFormat."""
        choices = []
        for index, answer in enumerate(answers):
            text, calls = self._divided(index, answer.text, answer.reason)
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if calls:
                message |= {"content": text or None, "tool_calls": calls}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._report(answer.tokens),
                    "finish_reason": self._reason(index, answer.reason),
                }
            )
        counts = usage(prompt_tokens, sum(answer.count for answer in answers))
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": counts}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Returns the chunk that names the role of the speaker."""
        return self._chunk(index, {"role": "assistant", "content": ""}, (), None)

    def chunk(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """See AnswerFormat."""
        text, calls = self._divided(index, output.text, output.reason)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            first = len(self._readers[index].calls) - len(calls)
            delta["tool_calls"] = [{"index": first + number, **call} for number, call in enumerate(calls)]
        return self._chunk(index, delta, output.tokens, self._reason(index, output.reason))

    def _divided(self, index: int, text: str, reason: str | None) -> tuple[str, list[dict[str, Any]]]:
        """(text, calls) of the next part of a choice; the last one has a reason."""
        if not self._tools:
            return text, []
        said, calls = self._readers[index].push(text)
        if reason is not None:
            remainder, last_calls = self._readers[index].close(is_complete=reason == "stop")
            said, calls = said + remainder, calls + last_calls
        return said, calls

    def _reason(self, index: int, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._tools and self._readers[index].calls else reason

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
        # A part of a character decodes to the replacement character, whose bytes would be misleading.
        return {"token": text, "logprob": _in_json(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}


def _in_json(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """Returns token counts. A prompt counts once for any number of choices, and the token that ended a choice counts,
    too.
    """
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }
