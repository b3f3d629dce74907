"""Runs the API server: binds the port, starts the engines, and stops at signals."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

from aiohttp import web

from tilewright.errors import ConfigError, TilewrightError
from tilewright.serve.api_server import ApiServer, LoadCoder
from tilewright.serve.web.app import make_app
from tilewright.serve.web.connections import Connection, connections_for, limits
from tilewright.serve.web.errors import ApiError
from tilewright.serve.web.server_log import say
from tilewright.serve.web.settings import ServerConfig

_LOOK_SECONDS = 0.05
_BUSY = ApiError(503, "overloaded", "there are too many connections").body()
_BUSY_HEAD = (
    "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 5\r\n"
    f"content-type: application/json\r\ncontent-length: {len(_BUSY)}\r\n\r\n"
)


def listen(host: str, port: int) -> socket.socket:
    """Return the listening socket. Port 0 selects a free port.

    Raises:
        ConfigError: if the address is not available.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(1024)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{host} port {port}: {reason}; allowed: a free address") from None
    return listener


def serve(
    settings: ServerConfig,
    command: Sequence[str],
    load_coder: LoadCoder,
    *,
    on_listening: Callable[[int], None],
) -> int:
    """Serve until a signal or the engine's end. Return the exit code.

    ``on_listening`` receives the port. Requests get status 503 until the engine is ready.

    Raises:
        TilewrightError: if the port is taken, or the engine cannot start.
    """
    import uvloop

    bound = listen(settings.host, settings.port)
    with contextlib.closing(bound), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(settings, command, load_coder, bound, on_listening))


@contextlib.asynccontextmanager
async def serving(
    settings: ServerConfig, command: Sequence[str], load_coder: LoadCoder, bound: socket.socket
) -> AsyncIterator[ApiServer]:
    """Run an API server on ``bound`` with its engines during the block."""
    front = ApiServer(settings, command, load_coder)
    runner = web.AppRunner(
        make_app(front), handler_cancellation=True, shutdown_timeout=1.0, **limits()
    )
    try:
        await runner.setup()
        assert runner.server is not None
        accepting = _accepting(runner.server, settings)
        listening = await asyncio.get_running_loop().create_server(accepting, sock=bound)
        try:
            front.client.start()
            yield front
        finally:
            listening.close()
    finally:
        await runner.cleanup()
        await front.close()


async def _run(
    settings: ServerConfig,
    command: Sequence[str],
    load_coder: LoadCoder,
    bound: socket.socket,
    on_listening: Callable[[int], None],
) -> int:
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    async with serving(settings, command, load_coder, bound) as front:
        on_listening(bound.getsockname()[1])
        ended = await _first(signals, front.client.ended)
        if ended is None:
            await _drain(front, signals)
            return 0
        code, _, said = ended.partition(" ")
        if code == "2":
            raise TilewrightError(said)
        say(said)
        return int(code)


async def _first(signals: asyncio.Queue[int], ended: asyncio.Future[str]) -> str | None:
    """Return the reason of the engine's end, or None for a signal before it."""
    heard = asyncio.ensure_future(signals.get())
    waited: set[asyncio.Future[Any]] = {heard, ended}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    heard.cancel()
    return ended.result() if ended.done() else None


async def _drain(front: ApiServer, signals: asyncio.Queue[int]) -> None:
    """Refuse new requests, and wait for running requests.

    The wait ends after ``drain_timeout`` or at a second signal.
    """
    front.is_draining = True
    loop = asyncio.get_running_loop()
    deadline = loop.time() + front.settings.drain_timeout
    while front.client.num_live and loop.time() < deadline and signals.empty():
        await asyncio.sleep(_LOOK_SECONDS)
    front.client.fail_all("draining", "the server is ending")
    await asyncio.sleep(_LOOK_SECONDS)  # time to send the last events


def _accepting(server: web.Server, settings: ServerConfig) -> Callable[[], asyncio.Protocol]:
    """Return a protocol factory. Connections above the limit get a refusal."""
    most = connections_for(settings.max_connections)
    if most < settings.max_connections:
        say(f"{most} connections at a time, not {settings.max_connections}: the system's limit")

    def make() -> asyncio.Protocol:
        is_full = len(server.connections) >= most
        return _Busy() if is_full else Connection(server, settings)

    return make


class _Busy(asyncio.Protocol):
    """Sends status 503 for too many connections, and closes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        writes = cast(asyncio.WriteTransport, transport)  # uvloop's class lacks this base
        writes.write(_BUSY_HEAD.encode() + _BUSY)
        writes.close()
