"""The server's connections: how long a client may take to send a request, and how many may be open.

[Note: half-sent requests]
uvicorn waits for ever for the rest of a request. So whoever opens connections and sends one byte in each could keep all
others out. Here a connection on which no request is whole and unanswered has `REQUEST_SECONDS` to bring one; when there
are too many connections, the one that has been without a request for longest is closed for the new one. Connections whose
request is being answered are never closed.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 30.0  # for head and body of a request, from the connection's beginning or the answer before


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, with the limits above. All attributes of uvicorn's that are read here are public."""

    def __init__(
        self, *args: Any, limit: int, seconds: float, idle: dict[TimedProtocol, asyncio.TimerHandle], **kwargs: Any
    ) -> None:
        """`idle`: shared by all connections of a server: those without a whole request, the longest first."""
        super().__init__(*args, **kwargs)
        self._limit, self._seconds, self._idle = limit, seconds, idle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new connection, in the place of an idle one where there are too many."""
        super().connection_made(transport)
        self._update()
        if len(self.connections) > self._limit and self._idle:
            next(iter(self._idle))._give_up()

    def data_received(self, data: bytes) -> None:
        """More of a request."""
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        """The end of an answer."""
        super().on_response_complete()
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end of the connection."""
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
        self.connections.discard(self)  # counted no more, though the transport ends a moment later
        self.transport.abort()  # not close, which would wait until the client has read what it was sent


def configure(
    app: Any, max_connections: int, *, grace_seconds: int, request_seconds: float = REQUEST_SECONDS
) -> uvicorn.Config:
    """How uvicorn runs the application. grace_seconds: for answers that are under way when it is told to end."""
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
