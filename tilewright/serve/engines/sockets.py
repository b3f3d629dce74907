"""Messages over a local ZeroMQ socket: one frame is a list of them in msgpack."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from tilewright.runtime.messages import FromEngine, ToEngine

encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(list[ToEngine])
from_engine = msgspec.msgpack.Decoder(list[FromEngine])


_LINGER_MS = 1000
_FRAMES = 64  # heard in a row; then those whose answers they brought are served


def address(folder: Path) -> str:
    """The address where server and engine meet; the folder's mode keeps others out."""
    return f"ipc://{folder}/engine"


class SocketTransport:
    """The engine's end of the sockets between it and the server."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        for limit in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(limit, 0)  # the front bounds what is under way
        self._socket.connect(address(folder))

    def receive(self, seconds: float) -> list[ToEngine]:
        """Return what has come, in order; waits up to ``seconds`` where there is nothing."""
        found: list[ToEngine] = []
        if seconds > 0:
            self._socket.poll(int(seconds * 1000) + 1)
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return found
            found += to_engine.decode(frame)

    def send(self, messages: list[FromEngine]) -> None:
        """Send messages to the server."""
        self._socket.send(encoder.encode(messages))

    def close(self) -> None:
        """Send what is left, and leave."""
        self._socket.close(linger=_LINGER_MS)
        self._context.term()


class FrontSocket:
    """The server's end, on its event loop: no task waits, the loop calls when a frame has come.

    Args:
        hear: takes what one frame held.
    """

    def __init__(self, folder: Path, hear: Callable[[bytes], None]) -> None:
        self._hear, self._is_due = hear, False
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        for limit in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(limit, 0)
        self._socket.bind(address(folder))
        self._file = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._file, self._look)
        self._look_soon()

    def send(self, messages: list[ToEngine]) -> None:
        """Send messages to the engine; nowhere, while there is none."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(encoder.encode(messages), zmq.NOBLOCK)
        self._look_soon()  # sending may have taken the one sign that a frame has come

    def close(self) -> None:
        """Leave; what has not been sent is lost."""
        if not self._socket.closed:
            self._loop.remove_reader(self._file)
            self._context.destroy(linger=0)

    def _look_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_due = False
        for _ in range(_FRAMES):
            if self._socket.closed:
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._hear(frame)
        self._look_soon()
