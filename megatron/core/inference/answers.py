"""The OpenAI API's answers: JSON objects made of an engine's pieces, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.inference.engine import ChosenToken, Piece


@dataclass
class Answer:
    """One choice: the pieces of a request, joined. `text` begins with the prompt where it is echoed."""

    text: str = ""
    tokens: list[ChosenToken] = field(default_factory=list)
    count: int = 0
    reason: str | None = None

    def add(self, piece: Piece) -> None:
        """The next piece."""
        self.text += piece.text
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

    def __init__(self, model: str, tokenizer: Tokenizer, echoes: Sequence[str], logprobs: bool) -> None:
        """`echoes`: for each choice, the prompt's text where it is echoed, else ""."""
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self._head["model"] = model
        self._tokenizer, self._echoes, self._logprobs = tokenizer, echoes, logprobs
        self._offsets = [0] * len(echoes)  # of each choice's next token in the answer's text

    def whole(self, answers: Sequence[Answer], prompt_tokens: int) -> dict[str, Any]:
        """See AnswerFormat."""
        choices = [
            self._choice(index, self._echoes[index] + answer.text, answer.tokens, answer.reason)
            for index, answer in enumerate(answers)
        ]
        return {**self._head, "choices": choices, "usage": usage(prompt_tokens, sum(a.count for a in answers))}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The echo."""
        echo = self._echoes[index]
        return {**self._head, "choices": [self._choice(index, echo, (), None)]} if echo else None

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """See AnswerFormat."""
        return {**self._head, "choices": [self._choice(index, piece.text, piece.tokens, piece.reason)]}

    def usage_chunk(self, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
        """See AnswerFormat."""
        return {**self._head, "choices": [], "usage": usage(prompt_tokens, new_tokens)}

    def _choice(self, index: int, text: str, tokens: Sequence[ChosenToken], reason: str | None) -> dict[str, Any]:
        logprobs = self._report(index, tokens) if self._logprobs and tokens else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _report(self, index: int, tokens: Sequence[ChosenToken]) -> dict[str, Any]:
        """Offsets count from the first new token's place on: what was echoed lies before it."""
        texts = [self._tokenizer.decode([token.id]) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(len(self._echoes[index]) + self._offsets[index])
            self._offsets[index] += len(text)
        top = [{self._tokenizer.decode([i]): value for i, value in token.top} for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": top,
            "text_offset": offsets,
        }


class ChatFormat:
    """/v1/chat/completions."""

    def __init__(self, model: str, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._tokenizer, self._logprobs = tokenizer, logprobs

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
        self, index: int, delta: dict[str, Any], tokens: Sequence[ChosenToken], reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": self._report(tokens), "finish_reason": reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _report(self, tokens: Sequence[ChosenToken]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            {**self._entry(token.id, token.logprob), "top_logprobs": [self._entry(*pair) for pair in token.top]}
            for token in tokens
        ]
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token])
        # A part of a character decodes to the mark for "no character", whose bytes would mislead.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """Token counts. A prompt counts once, however many choices it has; what ended a choice counts too."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }
