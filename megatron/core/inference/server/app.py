"""OpenAI's HTTP routes over an engine. The event loop only waits and formats answers; the engine's thread computes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import secrets
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron.base.errors import DataError
from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.inference.chat import ChatTemplate
from megatron.core.inference.engine import continuous_batching as batching
from megatron.core.inference.engine.text import finished
from megatron.core.inference.server.answers import Answer, AnswerFormat, ChatFormat, CompletionFormat, Echo
from megatron.core.inference.server.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    check_size,
    make_requests,
    parse,
    shorten,
)
from megatron.core.inference.server.tool_calls import CLOSE, OPEN

_Body = TypeVar("_Body", CompletionRequest, ChatRequest)
Numbered = tuple[int, batching.RequestOutput]  # an output and the number of its choice


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The server's settings. `add_bos` prepends bos to prompts of /v1/completions; chat templates write their own."""

    model: str
    api_key: str | None = None
    add_bos: bool = False
    chat_template: ChatTemplate | None = None
    max_body: int = 4 << 20  # maximum bytes of a request


def build_app(engine: batching.InferenceEngine, tokenizer: Tokenizer, settings: Settings) -> FastAPI:
    """Returns the application; `engine.run` must be running on another thread."""
    routes = _Routes(engine, tokenizer, settings)
    app = FastAPI(title="Megatron-Patched", docs_url=None, redoc_url=None, openapi_url=None)
    app.post("/v1/completions", response_model=None)(routes.completions)
    app.post("/v1/chat/completions", response_model=None)(routes.chat)
    app.get("/v1/models", response_model=None)(routes.models)
    app.get("/v1/models/{name:path}", response_model=None)(routes.one_model)
    app.get("/health", response_model=None)(routes.health)
    app.exception_handler(ApiError)(_answer_api_error)
    app.exception_handler(HTTPException)(_answer_http_error)
    if settings.api_key is not None:
        app.add_middleware(_RequireKey, key=settings.api_key)
    return app


class _Routes:
    """The routes of the application, one method per route."""

    def __init__(self, engine: batching.InferenceEngine, tokenizer: Tokenizer, settings: Settings) -> None:
        self._engine, self._tokenizer, self._settings = engine, tokenizer, settings
        self._created = int(time.time())
        bos = tokenizer.bos if settings.add_bos else None
        self._bos = () if bos is None else (bos,)  # the first tokens of text prompts
        # Some vocabularies have the marks of a tool call as special tokens, which have no text otherwise.
        marks = [] if settings.chat_template is None else tokenizer.encode_batch([OPEN, CLOSE])
        self._marks = [ids[0] for ids in marks if len(ids) == 1]

    async def completions(self, http: Request) -> Response:
        body = await self._read(CompletionRequest, http)
        texts = body.prompts()
        self._check_count(len(texts) * body.n)
        check_size(texts, self._engine.max_tokens)
        prompts = await asyncio.to_thread(self._encode, texts, self._settings.add_bos)
        echoes = await asyncio.to_thread(self._echoes, texts, body.n) if body.echo else [Echo()] * (len(texts) * body.n)
        answer = CompletionFormat(self._settings.model, self._tokenizer, echoes, body.logprobs is not None)
        return await self._serve(body, prompts, body.max_tokens, body.logprobs, answer, http, score_prompt=body.echo)

    async def chat(self, http: Request) -> Response:
        body = await self._read(ChatRequest, http)
        template = self._settings.chat_template
        if template is None:
            raise ApiError(
                400,
                "this model's tokenizer has no chat template; use /v1/completions, or start the server with "
                "--chat-template",
                "messages",
            )
        reported, limit = body.reported(), body.limit()
        self._check_count(body.n)
        messages, options = [message.for_template() for message in body.messages], body.template_options()
        check_size(["".join(message["content"] for message in messages)], self._engine.max_tokens)
        try:
            text = await asyncio.to_thread(functools.partial(template.render, messages, **options))
        except DataError as error:
            raise ApiError(400, str(error), "messages") from error
        check_size([text], self._engine.max_tokens)
        prompts = await asyncio.to_thread(self._encode, [text], False)
        tools = [tool["function"].get("name") for tool in options["tools"] or ()]
        answer = ChatFormat(self._settings.model, self._tokenizer, body.logprobs, tools)
        return await self._serve(body, prompts, limit, reported, answer, http, shown_ids=self._marks if tools else ())

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._model())

    async def health(self) -> Response:
        running, waiting = self._engine.load()
        failed = self._engine.failure is not None
        status = {"status": "failed" if failed else "ok", "running": running, "waiting": waiting}
        return JSONResponse(status, 503 if failed else 200)

    async def _serve(
        self,
        body: CompletionRequest | ChatRequest,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | None,
        top_logprobs: int | None,
        answer: AnswerFormat,
        http: Request,
        *,
        score_prompt: bool = False,
        shown_ids: Collection[int] = (),
    ) -> Response:
        outputs: asyncio.Queue[Numbered] = asyncio.Queue()
        requests = make_requests(
            body,
            prompts,
            max_tokens,
            top_logprobs,
            score_prompt=score_prompt,
            context=self._engine.max_tokens,
            vocab_size=self._tokenizer.vocab_size,
            shown_ids=shown_ids,
            on_output=functools.partial(_hand_over, asyncio.get_running_loop(), outputs),
        )
        try:
            self._engine.submit(requests)
        except (batching.QueueFull, batching.EngineStopped) as error:
            raise ApiError(503, str(error), code="overloaded") from error
        prompt_tokens = sum(len(prompt) for prompt in prompts)
        if body.stream:
            include_usage = body.stream_options.include_usage
            events = _events(answer, outputs, len(requests), prompt_tokens if include_usage else None)
            return _EventStream(events, requests)
        return await _whole_answer(answer, outputs, requests, prompt_tokens, http)

    async def _read(self, kind: type[_Body], http: Request) -> _Body:
        """Returns the request's body. Raises ApiError. Parsing runs on a thread, because its time grows with the body's
        size.
        """
        body = await asyncio.to_thread(parse, kind, await _receive(http, self._settings.max_body))
        self._check_model(body.model)
        return body

    def _encode(self, prompts: Sequence[str | list[int]], add_bos: bool) -> list[list[int]]:
        """Returns the ids of each prompt. Raises ApiError."""
        return [
            self._ids(prompt) if isinstance(prompt, list) else self._tokenize(prompt, add_bos) for prompt in prompts
        ]

    def _ids(self, prompt: list[int]) -> list[int]:
        bad = [i for i in prompt if not 0 <= i < self._tokenizer.vocab_size]
        if bad:
            raise ApiError(400, f"token id {shorten(str(bad[0]))} is not below {self._tokenizer.vocab_size}", "prompt")
        return prompt

    def _tokenize(self, prompt: str, add_bos: bool) -> list[int]:
        try:
            prompt.encode()
            ids = self._tokenizer.encode(prompt)
        except UnicodeEncodeError as error:
            raise ApiError(400, f"the prompt holds half of a surrogate pair: {error.reason}", "prompt") from error
        except DataError as error:
            raise ApiError(400, str(error), "prompt") from error
        return [*self._bos, *ids] if add_bos else ids

    def _echoes(self, prompts: Sequence[str | list[int]], n: int) -> list[Echo]:
        """Returns the echo of each choice."""
        echoes = [
            Echo(prompt, self._bos)
            if isinstance(prompt, str)
            else Echo(self._tokenizer.decode(prompt[: finished(self._tokenizer, prompt)]))
            for prompt in prompts
        ]
        return [echo for echo in echoes for _ in range(n)]

    def _check_count(self, answers: int) -> None:
        if answers > self._engine.max_waiting:
            raise ApiError(400, f"{answers} answers at once are more than this server's queue takes", "n")

    def _check_model(self, name: str | None) -> None:
        """Raises ApiError if the request names another model; naming one is optional."""
        if name not in (None, self._settings.model):
            message = f"the model {shorten(str(name))} does not exist here; this server has {self._settings.model}"
            raise ApiError(404, message, "model", "model_not_found")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._settings.model,
            "object": "model",
            "created": self._created,
            "owned_by": "megatron-patched",
            "max_model_len": self._engine.max_tokens,
        }


async def _receive(http: Request, limit: int) -> bytes:
    """Returns the body of a request. Raises ApiError for one that is too long, before or while it is read."""
    kind = http.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        # This check also rejects web pages: a browser sends other types without asking the server first.
        raise ApiError(415, f"the body's type is {shorten(kind) or 'missing'}; send Content-Type: application/json")
    too_long = ApiError(413, f"the body has more than {limit} bytes; send less, or several requests")
    if int(http.headers.get("content-length", 0)) > limit:
        raise too_long
    body = bytearray()
    try:
        async for part in http.stream():
            body += part
            if len(body) > limit:
                raise too_long
    except ClientDisconnect as error:
        raise ApiError(400, "the body ended early") from error  # the client is gone and does not read the answer
    return bytes(body)


def _hand_over(
    loop: asyncio.AbstractEventLoop, outputs: asyncio.Queue[Numbered], number: int, output: batching.RequestOutput
) -> None:
    """Passes an output from the engine's thread to the event loop's."""
    with contextlib.suppress(RuntimeError):  # the loop was closed, so there is no receiver
        loop.call_soon_threadsafe(outputs.put_nowait, (number, output))


async def _until_ended(outputs: asyncio.Queue[Numbered], choices: int) -> AsyncIterator[Numbered]:
    """Yields every output, up to the last one of the last choice. Raises ApiError if one ends with an error."""
    running = choices
    while running:
        number, output = await outputs.get()
        if output.reason == "error":
            raise ApiError(500, output.error)
        running -= output.reason is not None
        yield number, output


async def _whole_answer(
    answer: AnswerFormat,
    outputs: asyncio.Queue[Numbered],
    requests: Sequence[batching.Request],
    prompt_tokens: int,
    http: Request,
) -> Response:
    async def collect() -> Response:
        answers = [Answer() for _ in requests]
        async for number, output in _until_ended(outputs, len(requests)):
            answers[number].add(output)
        # Log-probabilities of long answers mean many texts to decode and much JSON, so use a thread.
        return await asyncio.to_thread(lambda: JSONResponse(answer.whole(answers, prompt_tokens)))

    work, gone = asyncio.create_task(collect()), asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        # the client is gone and does not read the answer
        return await work if work.done() else Response(status_code=499)
    finally:
        work.cancel()
        gone.cancel()
        for request in requests:
            request.cancel()


async def _disconnected(http: Request) -> None:
    """Returns when the client has disconnected. The body has been read, so nothing else is received."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _events(
    answer: AnswerFormat, outputs: asyncio.Queue[Numbered], choices: int, usage_of: int | None
) -> AsyncIterator[str]:
    """Yields server-sent events. `usage_of` is the number of prompt tokens if usage was requested."""
    counts = [0] * choices
    for number in range(choices):
        if (opening := answer.opening(number)) is not None:
            yield _event(opening)
    try:
        async for number, output in _until_ended(outputs, choices):
            counts[number] = output.count
            words = functools.partial(_chunk_event, answer, number, output)
            yield (
                await asyncio.to_thread(words) if output.prompt else words()
            )  # a prompt may have thousands of tokens to decode
    except ApiError as error:  # the status has been sent, so the error can only be reported in the stream
        yield _event(error.body())
        return
    if usage_of is not None:
        yield _event(answer.usage_chunk(usage_of, sum(counts)))
    yield "data: [DONE]\n\n"


def _chunk_event(answer: AnswerFormat, number: int, output: batching.RequestOutput) -> str:
    return _event(answer.chunk(number, output))


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


class _EventStream(StreamingResponse):
    """A stream that cancels its requests when it ends for any reason."""

    def __init__(self, events: AsyncIterator[str], requests: Sequence[batching.Request]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for request in self._requests:
                request.cancel()


class _RequireKey:
    """Answers 401 for every route under /v1 without the key; /health stays open for monitoring."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode(errors="surrogateescape")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            authorization = Headers(scope=scope).get("authorization", "").encode("latin-1")  # the bytes that were sent
            if not secrets.compare_digest(authorization, self._expected):
                what = "is wrong" if authorization else "is missing"
                error = ApiError(401, f"the API key {what}; send 'Authorization: Bearer KEY'", code="invalid_api_key")
                await _error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _error_response(error: ApiError) -> JSONResponse:
    headers = {"Retry-After": "1"} if error.status == 503 else {}
    return JSONResponse(error.body(), error.status, headers)


async def _answer_api_error(_: Request, error: ApiError) -> Response:
    return _error_response(error)


async def _answer_http_error(_: Request, error: HTTPException) -> Response:
    return _error_response(ApiError(error.status_code, error.detail))
