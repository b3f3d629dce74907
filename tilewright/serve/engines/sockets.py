"""Messages over a local ZeroMQ socket. A frame is a list of messages in msgpack."""

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
_FRAMES = 64  # frames in a row, before the event loop serves their receivers


def address(folder: Path) -> str:
    """Return the socket's address. The mode of the directory excludes other users."""
    return f"ipc://{folder}/engine"


class SocketTransport:
    """The engine's end of the socket to the API server."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        for limit in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(limit, 0)  # the API server limits its pending requests
        self._socket.connect(address(folder))

    def receive(self, seconds: float) -> list[ToEngine]:
        """Return the received messages in order. Wait up to ``seconds`` for the first message."""
        messages: list[ToEngine] = []
        if seconds > 0:
            self._socket.poll(int(seconds * 1000) + 1)
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages += to_engine.decode(frame)

    def send(self, messages: list[FromEngine]) -> None:
        """Send messages to the API server."""
        self._socket.send(encoder.encode(messages))

    def close(self) -> None:
        """Send the remaining messages, then close."""
        self._socket.close(linger=_LINGER_MS)
        self._context.term()


class FrontSocket:
    """The API server's end. The event loop calls ``on_frame`` for each frame, without a task.

    Args:
        folder: the socket's directory.
        on_frame: Receives a frame.
    """

    def __init__(self, folder: Path, on_frame: Callable[[bytes], None]) -> None:
        self._on_frame, self._is_due = on_frame, False
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
        """Send messages to the engine. Messages without an engine are dropped."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(encoder.encode(messages), zmq.NOBLOCK)
        self._look_soon()  # sending may have consumed the only event of a received frame

    def close(self) -> None:
        """Close. Unsent messages are lost."""
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
            self._on_frame(frame)
        self._look_soon()
