"""Messages over a local ZeroMQ socket: one frame is a list of them in msgpack."""

from __future__ import annotations

from pathlib import Path

import msgspec
import zmq

from tilewright.compiler.runtime.messages import FromEngine, ToEngine

encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(list[ToEngine])
from_engine = msgspec.msgpack.Decoder(list[FromEngine])


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
        self._socket.close(linger=1000)
        self._context.term()
