"""What one connection may do: how long a head may take, how slowly a client may read."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web

from tilewright.serve.web.errors import ApiError
from tilewright.serve.web.settings import ServerConfig

_LINE_BYTES = 8190
_HEADERS = 64
_KEEPALIVE_SECONDS = 75
_LINGER_SECONDS = 2
_SPARE_FILES = 256  # descriptors that are no connections
_LOG_CHARACTERS = 200
_LOOKS = 12  # in the time that a client may take nothing


def limits() -> dict[str, Any]:
    """The library's own limits, for its runner and for each connection."""
    return {
        "access_log": None,
        "logger": _quiet_log(),
        "keepalive_timeout": _KEEPALIVE_SECONDS,
        "lingering_time": _LINGER_SECONDS,
        "max_line_size": _LINE_BYTES,
        "max_field_size": _LINE_BYTES,
        "max_headers": _HEADERS,
        "auto_decompress": False,
    }


def connections_for(wanted: int) -> int:
    """How many of ``wanted`` connections there are descriptors for, once more are asked for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    return max(1, soft - _SPARE_FILES)


class Connection(web.RequestHandler):
    """One client's connection, with deadlines that the library has not.

    A request's line and headers must be whole ``header_timeout`` after they begin (for the first
    one: after the connection does), or it is closed. What is written must become less, by a byte at
    least, within ``write_timeout``, or the connection is reset and its handler cancelled.
    """

    __slots__ = (
        "_head_timer",
        "_num_stalled",
        "_num_unsent",
        "_settings",
        "_write_timer",
        "_writes_to",
    )

    def __init__(self, server: web.Server, settings: ServerConfig) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, **limits())
        self._settings = settings
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._writes_to: asyncio.Transport | None = None
        self._num_unsent = self._num_stalled = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to time the first request's head (called by asyncio)."""
        super().connection_made(transport)
        self._writes_to = cast(asyncio.Transport, transport)
        self._await_head()
        self._look_at_writes()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop this connection's timers (called by asyncio)."""
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._write_timer = self._writes_to = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes in; a whole head ends the time that it had (called by asyncio)."""
        known = self._request_count
        super().data_received(data)
        if self._request_count > known:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif data and self._head_timer is None and not self._is_busy():
            self._await_head()  # these bytes begin the next request

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP, in the form of all other errors; the connection is closed behind it.
        Nothing is logged of a client that has gone.
        """
        if not isinstance(exc, ConnectionError):
            super().handle_error(request, status, exc, message)  # logs; raises where it is too late
        is_ours = status >= 500
        said = "the server has a fault" if is_ours else "what was sent is no HTTP request"
        error = ApiError(status, "internal_error" if is_ours else "invalid_request", said)
        response = web.Response(status=status, body=error.body(), content_type="application/json")
        response.force_close()
        return response

    def _await_head(self) -> None:
        self._head_timer = self._later(self._settings.header_timeout, self._give_up_head)

    def _is_busy(self) -> bool:
        """Whether a request is under way, or waits for its handler. The library's waiter tells it
        too late: a client may write again before its handler has come to wait.
        """
        return self._request_in_progress or bool(self._messages)

    def _give_up_head(self) -> None:
        self._head_timer = None
        if not self._is_busy():
            self.force_close()

    def _look_at_writes(self) -> None:
        """Reset the connection where what is to be sent has not become less for too long."""
        if self._writes_to is None:
            return
        unsent = self._writes_to.get_write_buffer_size()
        is_stalled = unsent and self._num_unsent and unsent >= self._num_unsent
        self._num_stalled = self._num_stalled + 1 if is_stalled else 0
        self._num_unsent = unsent
        if self._num_stalled >= _LOOKS:
            self._writes_to.abort()
            return
        seconds = self._settings.write_timeout / _LOOKS
        self._write_timer = self._later(seconds, self._look_at_writes)

    def _later(self, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds, call)


class _Short(logging.Formatter):
    """Log lines of the library hold what clients send: they are cut, and have no traceback."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(record.getMessage().split())[:_LOG_CHARACTERS]


class _Handler(logging.StreamHandler[Any]):
    """One that does not mind where nothing can be written."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """See `logging.Handler`."""


def _quiet_log() -> logging.Logger:
    log = logging.getLogger("tilewright.serve")
    if not log.handlers:
        handler = _Handler(sys.stderr)
        handler.setFormatter(_Short())
        log.addHandler(handler)
        log.setLevel(logging.ERROR)
        log.propagate = False
    return log
