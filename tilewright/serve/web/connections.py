"""Connections with time limits for request heads and slow readers."""

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
_SPARE_FILES = 256  # descriptors besides connections
_LOG_CHARACTERS = 200
_LOOKS = 12  # checks within the write timeout


def limits() -> dict[str, Any]:
    """Return aiohttp's limits for its runner and its connections."""
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
    """Raise the limit of descriptors, and return the possible connection count."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    return max(1, soft - _SPARE_FILES)


class Connection(web.RequestHandler):
    """A client's connection with deadlines that aiohttp lacks.

    The request line and the headers must be complete ``header_timeout`` seconds after they begin,
    or after the connection for the first request. Else the connection is closed. The unsent bytes
    must shrink within ``write_timeout`` seconds. Else the connection is reset, and its handler is
    cancelled.
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
        """Start the timer of the first head (called by asyncio)."""
        super().connection_made(transport)
        self._writes_to = cast(asyncio.Transport, transport)
        self._await_head()
        self._look_at_writes()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop the timers of this connection (called by asyncio)."""
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._write_timer = self._writes_to = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive bytes. A complete head stops its timer (called by asyncio)."""
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
        """Return an error response for invalid HTTP, and close the connection.

        The form is the form of all errors. Lost clients are not logged.
        """
        if not isinstance(exc, ConnectionError):
            super().handle_error(request, status, exc, message)  # logs, and raises if too late
        is_ours = status >= 500
        said = "the server has a fault" if is_ours else "what was sent is no HTTP request"
        error = ApiError(status, "internal_error" if is_ours else "invalid_request", said)
        response = web.Response(status=status, body=error.body(), content_type="application/json")
        response.force_close()
        return response

    def _await_head(self) -> None:
        self._head_timer = self._later(self._settings.header_timeout, self._give_up_head)

    def _is_busy(self) -> bool:
        """Return whether a request runs or waits for its handler.

        aiohttp's waiter reports it too late: a client may write before its handler waits.
        """
        return self._request_in_progress or bool(self._messages)

    def _give_up_head(self) -> None:
        self._head_timer = None
        if not self._is_busy():
            self.force_close()

    def _look_at_writes(self) -> None:
        """Reset the connection if the unsent bytes have not shrunk for too long."""
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
    """Shortens log lines of aiohttp, which contain the client's text, and drops tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(record.getMessage().split())[:_LOG_CHARACTERS]


class _Handler(logging.StreamHandler[Any]):
    """A log handler that ignores write errors."""

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
