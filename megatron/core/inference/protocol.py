"""The OpenAI API's requests, and what they ask of the engine. A field is honoured, or refused by name."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron.core.errors import MegatronError
from megatron.core.inference.engine import Piece, Request
from megatron.core.inference.sampling import Sampling

DEFAULT_TOKENS = 16  # of /v1/completions, as in OpenAI's API; a chat answer may take all the room there is
# Values with which a field asks for nothing; clients send them. Any other value of these fields is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tool_calls": ([],),
    "annotations": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
_LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # for the provider's books; no answer changes


class ApiError(MegatronError):
    """A request that gets an error as its answer: HTTP status, and OpenAI's `type`, `param` and `code`."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """As OpenAI's API words it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        message = str(self).encode(errors="replace").decode()  # it may quote half of a surrogate pair, which is no text
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


class _Body(BaseModel):
    """null is the same as leaving a field out. `extra="forbid"` refuses what is not written here."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            name: value
            for name, value in data.items()
            if value is not None and name not in _LABELS and value not in _NEUTRAL.get(name, ())
        }


class StreamOptions(_Body):
    """Of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _Generation(_Body):
    """What both routes take. top_k is not OpenAI's: draw from the k likeliest tokens only; 0 cuts nothing."""

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    temperature: float = Field(1.0, ge=0.0, le=100.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    seed: int | None = Field(None, ge=0, lt=2**62)
    stop: str | list[str] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)

    def sampling(self) -> Sampling:
        """Temperature 0 takes the likeliest token, which no top_p or top_k cuts."""
        if self.temperature == 0.0:
            return Sampling(temperature=0.0)
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    def stops(self) -> list[str]:
        """The stop strings. Raises ApiError for an empty one."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if "" in stops:
            raise ApiError(400, "an empty stop string would end every answer before it begins", "stop")
        return stops


class CompletionRequest(_Generation):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(DEFAULT_TOKENS, ge=1)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each a text or a list of ids. Raises ApiError when there is none."""
        given: Any = self.prompt
        if not given:
            raise ApiError(400, "the prompt is empty", "prompt")
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] = ""
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates expect it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **named}


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def limit(self) -> int | None:
        """Longest answer, by either of its names. Raises ApiError when they disagree."""
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens are two names of one limit", "max_tokens")
        return next(iter(limits), None)

    def reported(self) -> int | None:
        """How many of the likeliest tokens to report; None: no log-probabilities at all. Raises ApiError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs has no effect without logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def describe_invalid(errors: Sequence[Any]) -> ApiError:
    """An answer to pydantic's errors about a body: of several, as for a union, to the one that lies deepest."""
    error = max(errors, key=lambda error: len(error["loc"]))
    # The members of a union are named in the path, too; the client has sent no such field.
    path = [str(part) for part in error["loc"] if part not in ("body", "str") and "[" not in str(part)]
    name = ".".join(path)
    if error["type"] == "json_invalid":
        reason = error.get("ctx", {}).get("error", error["msg"])
        return ApiError(400, f"the body is not JSON: {reason} at character {name}", None, "invalid_json")
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"{name} is not supported by this server; leave it out", name, "unsupported_parameter")
    return ApiError(400, f"{name or 'the body'}: {error['msg']}", name or None)


def make_requests(
    body: _Generation,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
    top_logprobs: int | None,
    *,
    context: int,
    on_piece: Callable[[int, Piece], None],
) -> list[Request]:
    """n requests a prompt, one prompt after another; request i draws with seed + i, and its pieces come with i.

    context: longest prompt and answer together. max_tokens None: all the room there is. Raises ApiError.
    """
    seed = secrets.randbits(62) if body.seed is None else body.seed
    requests: list[Request] = []
    for prompt in prompts:
        tokens = max(1, context - len(prompt)) if max_tokens is None else max_tokens
        _check_length(len(prompt), tokens, context)
        for _ in range(body.n):
            number = len(requests)
            requests.append(
                Request(
                    prompt=prompt,
                    max_new_tokens=tokens,
                    sampling=body.sampling(),
                    seed=seed + number,
                    on_piece=functools.partial(on_piece, number),
                    stop_strings=body.stops(),
                    top_logprobs=top_logprobs,
                )
            )
    return requests


def _check_length(prompt: int, new: int, context: int) -> None:
    if prompt == 0:
        raise ApiError(400, "the prompt has no tokens; send some text")
    if prompt + new > context:
        raise ApiError(
            400,
            f"this model's context is {context} tokens; the prompt has {prompt} and the answer may take {new}, "
            f"together {prompt + new}; shorten the prompt or lower max_tokens",
            code="context_length_exceeded",
        )
