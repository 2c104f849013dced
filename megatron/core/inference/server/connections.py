"""The server's connections: the time limit for sending a request, and the limit of open connections.

[Note: incomplete requests]
uvicorn waits without limit for the rest of a request. So a client that opens connections and sends one byte on each
could block all others. Here a connection without a complete, unanswered request has `REQUEST_SECONDS` to send one; if
there are too many connections, the one without a request for the longest time is closed in favour of the new one.
Connections whose request is being answered are never closed.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 30.0  # for head and body of a request, from the start of the connection or from the previous answer


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with the limits above. It only reads public attributes of uvicorn."""

    def __init__(
        self, *args: Any, limit: int, seconds: float, idle: dict[TimedProtocol, asyncio.TimerHandle], **kwargs: Any
    ) -> None:
        """`idle` is shared by all connections of a server: those without a complete request, in order of their
        start."""
        super().__init__(*args, **kwargs)
        self._limit, self._seconds, self._idle = limit, seconds, idle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Registers a new connection, and closes an idle one if there are too many."""
        super().connection_made(transport)
        self._update()
        if len(self.connections) > self._limit and self._idle:
            next(iter(self._idle))._give_up()

    def data_received(self, data: bytes) -> None:
        """Receives more data of a request."""
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        """Starts the time limit again at the end of an answer."""
        super().on_response_complete()
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets a closed connection."""
        super().connection_lost(exc)
        self._forget()

    def _update(self) -> None:
        idle = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
        if not idle or self.transport.is_closing():
            self._forget()
        elif self not in self._idle:
            self._idle[self] = self.loop.call_later(self._seconds, self._give_up)

    def _forget(self) -> None:
        timer = self._idle.pop(self, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self) -> None:
        self._forget()
        self.connections.discard(self)  # not counted any more, although the transport ends a moment later
        self.transport.abort()  # not close, which would wait until the client has read the data sent to it


def configure(
    app: Any, max_connections: int, *, grace_seconds: int, request_seconds: float = REQUEST_SECONDS
) -> uvicorn.Config:
    """Returns uvicorn's configuration for the application. `grace_seconds` lets running answers finish at shutdown."""
    protocol = functools.partial(TimedProtocol, limit=max_connections, seconds=request_seconds, idle={})
    return uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", protocol),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=grace_seconds,
    )
