"""The OpenAI API's requests and their conversion to requests of the engine. Each field has its effect, or is
rejected."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron.base.errors import MegatronError
from megatron.core.inference.engine.continuous_batching import Request, RequestOutput
from megatron.core.inference.engine.penalties import Penalties
from megatron.core.inference.engine.sampling import Sampling

DEFAULT_TOKENS = 16  # for /v1/completions, as in OpenAI's API; a chat answer may use all the remaining context
# These limits keep a request's cost in proportion to its answer. All generated text is compared with every stop string;
# OpenAI's API takes four of them.
MAX_STOPS, MAX_STOP_LENGTH, MAX_FIELDS, MAX_BIASES = 32, 256, 64, 1024
# The longest tokens of vocabularies such as GPT-2's have 128 characters: a prompt with more characters than this per
# token of the context cannot fit, and is rejected without tokenising it.
CHARACTERS_PER_TOKEN = 256
# Values with which a field has no effect; clients send them. Any other value of these fields is rejected.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tool_calls": ([],),
    "annotations": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    # vLLM's and SGLang's
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True, False),
    "bad_words": ([],),
    "documents": ([],),
    "chat_template_kwargs": ({},),
    "include_reasoning": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "priority": (0,),
    "continuous_usage_stats": (False,),
}
_WHY_NOT = {
    "response_format": "answers are not constrained to a form; ask for JSON in the prompt",
    "tool_choice": 'answers are not constrained to a call; send "auto" or "none"',
    "parallel_tool_calls": "the model decides how many calls it makes",
    "functions": "it is the old name; send tools",
    "function_call": "it is the old name; send tools and tool_choice",
    "reasoning_effort": "templates name it in their own way; send chat_template_kwargs",
    "best_of": "answers are not ranked; send n",
    "suffix": "the model continues prompts, and fills no gaps",
    "use_beam_search": "answers are sampled; send temperature 0 for the likeliest tokens",
}
# for the provider's records; they change no answer
_LABELS = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "cache_salt",
    "cache_control",
)


class ApiError(MegatronError):
    """A request that is answered with an error: HTTP status, and OpenAI's `type`, `param` and `code`."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Returns the error in the format of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        # it may quote an unpaired surrogate, which is not valid text
        message = str(self).encode(errors="replace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


class _Body(BaseModel):
    """The base of all request types. null is the same as omitting a field; `extra="forbid"` rejects other fields."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise ApiError(400, f"an object of {len(data)} fields; none here has more than {MAX_FIELDS}")
        return {
            name: value
            for name, value in data.items()
            if value is not None and name not in _LABELS and value not in _NEUTRAL.get(name, ())
        }


class StreamOptions(_Body):
    """The options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _Generation(_Body):
    """The fields of both routes: OpenAI's, and in a block of their own vLLM's, with the meanings that they have
    there."""

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    temperature: float = Field(1.0, ge=0.0, le=100.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: dict[str, float] = Field(default_factory=dict, max_length=MAX_BIASES)
    seed: int | None = Field(None, ge=0, lt=2**62)
    stop: str | Annotated[list[str], Field(fail_fast=True)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)

    top_k: int = Field(0, ge=-1, lt=2**31)  # 0 and -1 are no limit
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100.0)  # no logit overflows
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] = Field(default_factory=list, max_length=MAX_BIASES)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, lt=2**31)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def sampling(self) -> Sampling:
        """Returns the sampling settings. Temperature 0 takes the likeliest token, so limits on the others have no
        effect."""
        if self.temperature == 0.0:
            return Sampling(temperature=0.0)
        return Sampling(temperature=self.temperature, top_k=max(self.top_k, 0), top_p=self.top_p, min_p=self.min_p)

    def penalties(self, vocab_size: int) -> Penalties:
        """Returns the changes of logits. Raises ApiError for a bias or a token to stop at that is none of the
        vocabulary."""
        bias = {}
        for key, value in self.logit_bias.items():
            # Python refuses to convert thousands of digits, and no id has more than nine.
            if not key.isascii() or not key.isdecimal() or len(key) > 9 or int(key) >= vocab_size:
                raise ApiError(
                    400, f"logit_bias has '{shorten(key)}', which is no token id below {vocab_size}", "logit_bias"
                )
            if not -100.0 <= value <= 100.0:
                raise ApiError(400, f"logit_bias of {key} is {value:g}; it may be from -100 to 100", "logit_bias")
            bias[int(key)] = value
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise ApiError(
                    400, f"stop_token_ids has {token}, which is no token id below {vocab_size}", "stop_token_ids"
                )
        return Penalties(
            presence=self.presence_penalty,
            frequency=self.frequency_penalty,
            repetition=self.repetition_penalty,
            bias=bias,
        )

    def stops(self) -> list[str]:
        """Returns the stop strings. Raises ApiError for an empty one, too many, or one that is too long."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if len(stops) > MAX_STOPS:
            raise ApiError(400, f"{len(stops)} stop strings are more than {MAX_STOPS}", "stop")
        if any(len(stop) > MAX_STOP_LENGTH for stop in stops):
            raise ApiError(400, f"a stop string may have {MAX_STOP_LENGTH} characters, and no more", "stop")
        if "" in stops:
            raise ApiError(400, "an empty stop string would end every answer before it begins", "stop")
        return stops


_Ids = Annotated[list[int], Field(fail_fast=True)]


class CompletionRequest(_Generation):
    """A request of POST /v1/completions. `max_tokens` 0 with `echo` only returns the prompt's log-probabilities."""

    prompt: str | _Ids | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[_Ids], Field(fail_fast=True)]
    max_tokens: int = Field(DEFAULT_TOKENS, ge=0, lt=2**31)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    def prompts(self) -> list[str] | list[list[int]]:
        """Returns the prompts, each a text or a list of ids. Raises ApiError if there is none."""
        prompt: Any = self.prompt
        if not prompt:
            raise ApiError(400, "the prompt is empty", "prompt")
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class TextPart(_Body):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(_Body):
    """The function that a turn calls, and its arguments as JSON text."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(_Body):
    """A call of a tool in a turn of the assistant."""

    type: Literal["function"] = "function"
    function: CalledFunction
    id: str | None = None
    index: int | None = None  # of a chunk of a stream, which some clients send back


class ChatMessage(_Body):
    """One turn of a conversation."""

    type: Literal["text"] = "text"  # lm-evaluation-harness writes it into messages; without effect
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] = ""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # its name in newer servers
    refusal: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the message in the form that chat templates expect."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        fields = self.model_dump(exclude_none=True, exclude={"type", "role", "content", "tool_calls", "reasoning"})
        if self.reasoning is not None:
            fields.setdefault("reasoning_content", self.reasoning)
        calls = [call.model_dump(exclude_none=True, exclude={"index"}) for call in self.tool_calls]
        return {"role": self.role, "content": text, **fields, **({"tool_calls": calls} if calls else {})}


class FunctionDefinition(BaseModel):
    """A function for the chat template to show, with all of its fields."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str = Field(min_length=1)


class FunctionTool(_Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class ChatRequest(_Generation):
    """A request of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto"] = "auto"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: Literal[False] = False
    add_special_tokens: Literal[False] = False

    def template_options(self) -> dict[str, Any]:
        """Returns the chat template's inputs besides the messages. Raises ApiError for one that it must not get."""
        reserved = {"messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"}
        reserved |= {"conversation", "return_dict", "return_tensors", "documents", "tokenizer_kwargs", "padding"}
        if named := sorted(reserved & self.chat_template_kwargs.keys()):
            raise ApiError(400, f"chat_template_kwargs must not have {named[0]}", "chat_template_kwargs")
        if self.continue_final_message and (
            self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        ):
            raise ApiError(
                400,
                "continue_final_message begins no new turn; send add_generation_prompt: false",
                "continue_final_message",
            )
        tools = [tool.model_dump() for tool in self.tools] if self.tool_choice != "none" else []
        return {
            **self.chat_template_kwargs,
            "tools": tools or None,
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
        }

    def limit(self) -> int | None:
        """Returns the maximum length of the answer, from either of its two fields. Raises ApiError if they disagree."""
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens are two names of one limit", "max_tokens")
        return next(iter(limits), None)

    def reported(self) -> int | None:
        """Returns the number of likeliest tokens to report, or None for no log-probabilities. Raises ApiError."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs has no effect without logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


_Parsed = TypeVar("_Parsed", bound=_Generation)


def parse(kind: type[_Parsed], body: bytes) -> _Parsed:
    """Returns the request in a JSON body. Raises ApiError naming the wrong field."""
    try:
        return kind.model_validate(json.loads(body))
    except ValidationError as error:  # ValidationError is a ValueError, too
        raise _describe(error.errors(include_url=False, include_input=False)) from error
    except json.JSONDecodeError as error:
        message = f"the body is not JSON: {error.msg} at character {error.pos}"
        raise ApiError(400, message, None, "invalid_json") from error
    except ValueError as error:  # not UTF-8, or a number with thousands of digits
        raise ApiError(400, f"the body is not JSON: {error}", None, "invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the body's JSON is nested too deeply", None, "invalid_json") from error


def _describe(errors: Sequence[Any]) -> ApiError:
    """Converts the most deeply nested of several errors, which a union reports."""
    error = max(errors, key=lambda error: len(error["loc"]))
    # The path also contains the members of a union, which are not fields of the request.
    path = [str(part) for part in error["loc"] if part != "str" and "[" not in str(part)]
    name = shorten(".".join(path))
    why = _WHY_NOT.get(path[0]) if path else None
    if error["type"] == "extra_forbidden" and why is not None:
        return ApiError(400, f"{name} is not supported: {why}", name, "unsupported_parameter")
    if why is not None:
        return ApiError(400, f"{name}: {error['msg']}; {why}", name)
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"{name} is not supported by this server; leave it out", name, "unsupported_parameter")
    return ApiError(400, f"{name or 'the body'}: {error['msg']}", name or None)


def shorten(text: str) -> str:
    """Shortens text from a client for quoting in an error."""
    return text if len(text) <= 100 else f"{text[:100]}..."


def check_size(prompts: Sequence[str | Sequence[int]], context: int) -> None:
    """Raises ApiError for a prompt that cannot fit, before tokenising it, which takes time in proportion to its
    length."""
    for prompt in prompts:
        if not isinstance(prompt, str):
            _check_length(len(prompt), 0, context)
        elif len(prompt) > CHARACTERS_PER_TOKEN * context:
            raise ApiError(
                400,
                f"this model's context is {context} tokens, and the prompt has {len(prompt)} characters; shorten it",
                code="context_length_exceeded",
            )


def make_requests(
    body: _Generation,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
    top_logprobs: int | None,
    *,
    score_prompt: bool,
    context: int,
    vocab_size: int,
    shown_ids: Collection[int],
    on_output: Callable[[int, RequestOutput], None],
) -> list[Request]:
    """Returns n requests per prompt, in order; request i uses seed + i, and `on_output` gets i with its outputs.

    `context` is the maximum length of prompt and answer together. `max_tokens` None allows all remaining context.
    `shown_ids` are special tokens that have text nevertheless. Raises ApiError.
    """
    seed = secrets.randbits(62) if body.seed is None else body.seed
    sampling, stops, penalties = body.sampling(), body.stops(), body.penalties(vocab_size)
    requests: list[Request] = []
    for prompt in prompts:
        tokens = max(1, context - len(prompt)) if max_tokens is None else max_tokens
        _check_length(len(prompt), tokens, context)
        if body.min_tokens > tokens:
            raise ApiError(
                400, f"min_tokens {body.min_tokens} is above the {tokens} that the answer may take", "min_tokens"
            )
        for _ in range(body.n):
            number = len(requests)
            requests.append(
                Request(
                    prompt=prompt,
                    max_new_tokens=tokens,
                    sampling=sampling,
                    seed=seed + number,
                    on_output=functools.partial(on_output, number),
                    stop_strings=stops,
                    stop_ids=body.stop_token_ids,
                    ignores_ends=body.ignore_eos,
                    min_tokens=body.min_tokens,
                    keeps_stop=body.include_stop_str_in_output,
                    shows_special=not body.skip_special_tokens,
                    shown_ids=shown_ids,
                    penalties=penalties,
                    top_logprobs=top_logprobs,
                    score_prompt=score_prompt,
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
