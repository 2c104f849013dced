"""OpenAI's HTTP routes over an engine. The event loop only waits and words answers; the engine's thread computes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.errors import DataError
from megatron.core.inference import engine as engines
from megatron.core.inference.answers import Answer, AnswerFormat, ChatFormat, CompletionFormat
from megatron.core.inference.chat import ChatTemplate
from megatron.core.inference.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    describe_invalid,
    make_requests,
)

Numbered = tuple[int, engines.Piece]  # a piece and the choice that it belongs to


@dataclass(frozen=True, kw_only=True)
class Settings:
    """add_bos: begin the prompts of /v1/completions with the tokenizer's bos; chat templates write their own."""

    model: str
    api_key: str | None = None
    add_bos: bool = False
    chat_template: ChatTemplate | None = None


def build_app(engine: engines.Engine, tokenizer: Tokenizer, settings: Settings) -> FastAPI:
    """The application; `engine.run` must be running on another thread."""
    routes = _Routes(engine, tokenizer, settings)
    app = FastAPI(title="Megatron-Patched", docs_url=None, redoc_url=None, openapi_url=None)
    app.post("/v1/completions", response_model=None)(routes.completions)
    app.post("/v1/chat/completions", response_model=None)(routes.chat)
    app.get("/v1/models", response_model=None)(routes.models)
    app.get("/v1/models/{name:path}", response_model=None)(routes.one_model)
    app.get("/health", response_model=None)(routes.health)
    app.exception_handler(ApiError)(_answer_api_error)
    app.exception_handler(RequestValidationError)(_answer_invalid)
    app.exception_handler(HTTPException)(_answer_http_error)
    if settings.api_key is not None:
        app.add_middleware(_RequireKey, key=settings.api_key)
    return app


class _Routes:
    """One method a route."""

    def __init__(self, engine: engines.Engine, tokenizer: Tokenizer, settings: Settings) -> None:
        self._engine, self._tokenizer, self._settings = engine, tokenizer, settings
        self._created = int(time.time())

    async def completions(self, body: CompletionRequest, http: Request) -> Response:
        self._check_model(body.model)
        if body.echo and body.logprobs is not None:
            raise ApiError(400, "logprobs of an echoed prompt are not supported; leave one out", "logprobs")
        given = body.prompts()
        prompts = [await asyncio.to_thread(self._encode, prompt) for prompt in given]
        echoes = ["" if not body.echo else self._text(prompt) for prompt in given for _ in range(body.n)]
        answer = CompletionFormat(self._settings.model, self._tokenizer, echoes, body.logprobs is not None)
        return await self._serve(body, prompts, body.max_tokens, body.logprobs, answer, http)

    async def chat(self, body: ChatRequest, http: Request) -> Response:
        self._check_model(body.model)
        template = self._settings.chat_template
        if template is None:
            raise ApiError(
                400,
                "this model's tokenizer has no chat template; use /v1/completions, or start the server with "
                "--chat-template",
                "messages",
            )
        reported, limit = body.reported(), body.limit()
        try:
            text = template.render([message.for_template() for message in body.messages])
        except DataError as error:
            raise ApiError(400, str(error), "messages") from error
        prompt = await asyncio.to_thread(self._encode, text, False)
        answer = ChatFormat(self._settings.model, self._tokenizer, body.logprobs)
        return await self._serve(body, [prompt], limit, reported, answer, http)

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
    ) -> Response:
        pieces: asyncio.Queue[Numbered] = asyncio.Queue()
        requests = make_requests(
            body,
            prompts,
            max_tokens,
            top_logprobs,
            context=self._engine.max_tokens,
            on_piece=functools.partial(_hand_over, asyncio.get_running_loop(), pieces),
        )
        if len(requests) > self._engine.max_waiting:
            raise ApiError(400, f"{len(requests)} answers at once are more than this server's queue takes", "n")
        try:
            self._engine.submit(requests)
        except (engines.QueueFull, engines.EngineStopped) as error:
            raise ApiError(503, str(error), code="overloaded") from error
        prompt_tokens = sum(len(prompt) for prompt in prompts)
        if body.stream:
            include_usage = body.stream_options.include_usage
            events = _events(answer, pieces, len(requests), prompt_tokens if include_usage else None)
            return _EventStream(events, requests)
        return await _whole_answer(answer, pieces, requests, prompt_tokens, http)

    def _encode(self, prompt: str | list[int], add_bos: bool = True) -> list[int]:
        """Ids of a prompt. Raises ApiError."""
        if isinstance(prompt, list):
            bad = [i for i in prompt if not 0 <= i < self._tokenizer.vocab_size]
            if bad:
                raise ApiError(400, f"token id {bad[0]} is not below {self._tokenizer.vocab_size}", "prompt")
            return prompt
        try:
            prompt.encode()
            ids = self._tokenizer.encode(prompt)
        except UnicodeEncodeError as error:
            raise ApiError(400, f"the prompt holds half of a surrogate pair: {error}", "prompt") from error
        except DataError as error:
            raise ApiError(400, str(error), "prompt") from error
        bos = self._tokenizer.bos
        return [bos, *ids] if add_bos and self._settings.add_bos and bos is not None else ids

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _check_model(self, name: str | None) -> None:
        """A request need not name the only model there is."""
        if name not in (None, self._settings.model):
            message = f"the model {name} does not exist here; this server has {self._settings.model}"
            raise ApiError(404, message, "model", "model_not_found")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._settings.model,
            "object": "model",
            "created": self._created,
            "owned_by": "megatron-patched",
            "max_model_len": self._engine.max_tokens,
        }


def _hand_over(
    loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue[Numbered], number: int, piece: engines.Piece
) -> None:
    """From the engine's thread to the event loop's."""
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens any more
        loop.call_soon_threadsafe(pieces.put_nowait, (number, piece))


async def _until_ended(pieces: asyncio.Queue[Numbered], choices: int) -> AsyncIterator[Numbered]:
    """Every piece, up to the last one of the last choice. Raises ApiError when one ends with an error."""
    running = choices
    while running:
        number, piece = await pieces.get()
        if piece.reason == "error":
            raise ApiError(500, piece.error)
        running -= piece.reason is not None
        yield number, piece


async def _whole_answer(
    answer: AnswerFormat,
    pieces: asyncio.Queue[Numbered],
    requests: Sequence[engines.Request],
    prompt_tokens: int,
    http: Request,
) -> Response:
    async def collect() -> dict[str, Any]:
        answers = [Answer() for _ in requests]
        async for number, piece in _until_ended(pieces, len(requests)):
            answers[number].add(piece)
        return answer.whole(answers, prompt_tokens)

    work, gone = asyncio.create_task(collect()), asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(await work) if work.done() else Response(status_code=499)  # which nobody reads
    finally:
        work.cancel()
        gone.cancel()
        for request in requests:
            request.cancel()


async def _disconnected(http: Request) -> None:
    """Return when the client has gone. The body has been read: nothing else is received."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _events(
    answer: AnswerFormat, pieces: asyncio.Queue[Numbered], choices: int, usage_of: int | None
) -> AsyncIterator[str]:
    """Server-sent events. usage_of: the prompt's tokens, where usage was asked for."""
    counts = [0] * choices
    for number in range(choices):
        if (opening := answer.opening(number)) is not None:
            yield _event(opening)
    try:
        async for number, piece in _until_ended(pieces, choices):
            counts[number] = piece.count
            yield _event(answer.chunk(number, piece))
    except ApiError as error:  # the status has been sent: it can only be said in the stream
        yield _event(error.body())
        return
    if usage_of is not None:
        yield _event(answer.usage_chunk(usage_of, sum(counts)))
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


class _EventStream(StreamingResponse):
    """A stream that gives its rows up when it ends, however it ends."""

    def __init__(self, events: AsyncIterator[str], requests: Sequence[engines.Request]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for request in self._requests:
                request.cancel()


class _RequireKey:
    """401 for every route under /v1 without the key; /health stays open to those who watch the server."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")  # the bytes that were sent
            if not secrets.compare_digest(given, self._expected):
                what = "is wrong" if given else "is missing"
                error = ApiError(401, f"the API key {what}; send 'Authorization: Bearer KEY'", code="invalid_api_key")
                await _error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _error_response(error: ApiError) -> JSONResponse:
    headers = {"Retry-After": "1"} if error.status == 503 else {}
    return JSONResponse(error.body(), error.status, headers)


async def _answer_api_error(_: Request, error: ApiError) -> Response:
    return _error_response(error)


async def _answer_invalid(_: Request, error: RequestValidationError) -> Response:
    return _error_response(describe_invalid(error.errors()))


async def _answer_http_error(_: Request, error: HTTPException) -> Response:
    return _error_response(ApiError(error.status_code, error.detail))
