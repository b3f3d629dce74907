"""Framed messages between rank 0 and a follower over a stream socket, local or TCP.

Both ends first prove knowledge of the run's token. Messages contain no pickles.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import math
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tilewright.distributed.processes import is_stopped, process_behind
from tilewright.errors import ConfigError, RankError

_FRAME = struct.Struct("<IIq")  # kind, the payload's bytes, number
_PROOF = hashlib.sha256().digest_size
_NONCE = 32
_MOST_BYTES = 1 << 30
_RETRY_SECONDS = 0.05
_LOOK_SECONDS = 0.1
_SILENCE_SECONDS = 10  # silence of a dead host before the kernel reports it


class ChannelClosedError(Exception):
    """The connection is closed."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a group: a local socket in a directory, or a TCP port on ``host``."""

    host: str = ""
    port: int = 0
    path: Path | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address's text form.

        Raises:
            ConfigError: The text is not an address.
        """
        kind, _, rest = text.partition(":")
        if kind == "unix" and rest:
            return cls(path=Path(rest))
        host, _, port = rest.rpartition(":")
        if kind != "tcp" or not _is_host(host) or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"address {text!r}; allowed: tcp:HOST:PORT or unix:PATH")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"tcp:{self.host}:{self.port}" if self.path is None else f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class Frame:
    """A message. The sender defines ``kind``. ``number`` counts steps."""

    kind: int
    number: int
    payload: bytes


class Channel:
    """An end of a connection between two ranks. Several threads may send.

    ``heard`` is the time of the last received bytes, on the clock of `time.monotonic`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.heard = time.monotonic()
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._buffer = bytearray()

    def send(self, kind: int, number: int = 0, payload: bytes = b"") -> None:
        """Send a whole message.

        Raises:
            ChannelClosedError: The other end is closed or does not read.
        """
        frame = _FRAME.pack(kind, len(payload), number) + payload
        try:
            with self._sending:
                self.connection.sendall(frame)
        except OSError as error:
            raise ChannelClosedError(error.strerror or str(error)) from None

    def send_if_free(self, kind: int) -> None:
        """Send an empty message unless another thread is sending or the buffer is full."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(OSError):
                frame = _FRAME.pack(kind, 0, 0)
                sent = self.connection.send(frame, socket.MSG_DONTWAIT)
                self.connection.sendall(frame[sent:])
        finally:
            self._sending.release()

    def receive(self, seconds: float | None = None) -> Frame | None:
        """Return the next message, or None after ``seconds``.

        Raises:
            ChannelClosedError: The other end is closed.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._receiving:
            while (found := self._take()) is None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                if not self._read(left):
                    return None
        return found

    def read_ready(self) -> list[Frame]:
        """Read from a readable socket without waiting. Return the complete messages.

        Raises:
            ChannelClosedError: The other end is closed.
        """
        self._read(None)
        found = []
        while (message := self._take()) is not None:
            found.append(message)
        return found

    def listen(self) -> bool:
        """Read available bytes for a later `receive`. Return False if the other end is closed.

        If another thread is receiving, do nothing.
        """
        if not self._receiving.acquire(blocking=False):
            return True
        try:
            self._read(0.0)
        except ChannelClosedError:
            return False
        finally:
            self._receiving.release()
        return True

    def process(self) -> int | None:
        """Return the process at the other end of a local listening socket, else None."""
        return process_behind(self.connection)

    def close(self) -> None:
        """Close this end. The other end reads an end of stream."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def _read(self, seconds: float | None) -> bool:
        if seconds is not None and not select.select([self.connection], [], [], seconds)[0]:
            return False
        try:
            data = self.connection.recv(1 << 20)
        except OSError as error:
            raise ChannelClosedError(error.strerror or str(error)) from None
        if not data:
            raise ChannelClosedError("it closed the channel")
        self.heard = time.monotonic()
        self._buffer += data
        return True

    def _take(self) -> Frame | None:
        if len(self._buffer) < _FRAME.size:
            return None
        kind, size, number = _FRAME.unpack_from(self._buffer)
        if size > _MOST_BYTES:
            raise ChannelClosedError(f"a message of {size} bytes")
        end = _FRAME.size + size
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_FRAME.size : end])
        del self._buffer[:end]
        return Frame(kind, number, payload)


class RankListener:
    """A listening socket for ranks, bound to its address only. Local sockets have mode 0600."""

    def __init__(self, address: Address, token: bytes) -> None:
        self._token = token
        try:
            if address.path is not None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.bind(str(address.path))
                address.path.chmod(0o600)
                self.address = address
            else:
                family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
                self._socket = socket.socket(family, socket.SOCK_STREAM)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._socket.bind((address.host, address.port))
                self.address = Address(address.host, self._socket.getsockname()[1])
        except OSError as error:
            raise ConfigError(
                f"{address}: cannot listen there ({error.strerror}); allowed: an address of this "
                "machine and a free port"
            ) from None
        self._socket.listen(256)

    def accept(self, deadline: float) -> tuple[int, socket.socket] | None:
        """Return the next authenticated rank with its socket, or None at the deadline.

        Connections without the token are closed.
        """
        while (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                return None
            connection.settimeout(min(left, 10.0))
            try:
                rank = _check_caller(connection, self._token)
            except (OSError, ChannelClosedError):
                connection.close()
                continue
            return rank, _prepared(connection)
        return None

    def close(self) -> None:
        """Close the listening socket."""
        self._socket.close()
        if self.address.path is not None:
            with contextlib.suppress(OSError):
                self.address.path.unlink()


def call(
    address: Address,
    rank: int,
    token: bytes,
    *,
    seconds: float,
    other: str = "rank 0",
    limit_s: float = math.inf,
) -> socket.socket:
    """Connect to a listener as ``rank``. Retry until it listens.

    Args:
        address: The listener's address.
        rank: This rank.
        token: The run's token.
        seconds: Time limit.
        other: The listener's name in messages.
        limit_s: Maximum time a local listener may be stopped before its answer.

    Raises:
        ConfigError: There is no answer in time, or the tokens differ.
        RankError: The listener was stopped for too long.
    """
    deadline, reason = time.monotonic() + seconds, "nobody listens"
    while time.monotonic() < deadline:
        try:
            connection = _connect(address, deadline - time.monotonic())
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(_RETRY_SECONDS)
            continue
        try:
            connection.settimeout(max(_RETRY_SECONDS, deadline - time.monotonic()))
            _prove(connection, rank, token, functools.partial(_await, connection, other, limit_s))
        except TimeoutError:
            connection.close()
            reason = "it took the call and said nothing, as one that is at work does"
        except (OSError, ChannelClosedError):
            connection.close()
            raise ConfigError(
                f"{other} at {address} hung up on rank {rank}; allowed: the same TILEWRIGHT_TOKEN "
                "on all machines, and each rank once"
            ) from None
        else:
            return _prepared(connection)
    raise ConfigError(
        f"{other} at {address} did not answer rank {rank} within {seconds:g} s ({reason})"
    )


def _is_host(name: str) -> bool:
    """Return whether a text is a possible host name. Sockets raise different errors for invalid
    names.
    """
    try:
        return bool(name.encode("idna")) and "\0" not in name
    except UnicodeError:
        return False


def has_gone(connection: socket.socket) -> bool:
    """Return whether the other end is closed. Unread data may remain."""
    found = select.poll()
    found.register(connection, select.POLLRDHUP)
    return bool(found.poll(0))


def own_address(other: Address) -> str:
    """Return this machine's address on the route to another address. Nothing is sent.

    Raises:
        ConfigError: There is no route.
    """
    family = socket.AF_INET6 if ":" in other.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as found:
        try:
            found.connect((other.host, other.port))
        except OSError as error:
            raise ConfigError(f"{other}: cannot be reached ({error.strerror})") from None
        return str(found.getsockname()[0])


def _connect(address: Address, seconds: float) -> socket.socket:
    if address.path is None:
        return socket.create_connection((address.host, address.port), timeout=seconds)
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.settimeout(seconds)
    try:
        found.connect(str(address.path))
    except OSError:
        found.close()
        raise
    return found


def _check_caller(connection: socket.socket, token: bytes) -> int:
    nonce = secrets.token_bytes(_NONCE)
    connection.sendall(nonce)
    data = _exactly(connection, 4 + _NONCE + _PROOF)
    rank, theirs, proof = data[:4], data[4 : 4 + _NONCE], data[4 + _NONCE :]
    if not hmac.compare_digest(proof, _proof(token, b"caller", nonce, theirs, rank)):
        raise ChannelClosedError("another token")
    connection.sendall(_proof(token, b"listener", nonce, theirs, rank))
    return int(struct.unpack("<i", rank)[0])


def _prove(connection: socket.socket, rank: int, token: bytes, wait: Callable[[], None]) -> None:
    wait()
    nonce = _exactly(connection, _NONCE)
    own, number = secrets.token_bytes(_NONCE), struct.pack("<i", rank)
    connection.sendall(number + own + _proof(token, b"caller", nonce, own, number))
    wait()
    answer = _exactly(connection, _PROOF)
    if not hmac.compare_digest(answer, _proof(token, b"listener", nonce, own, number)):
        raise ChannelClosedError("another token")


def _await(connection: socket.socket, other: str, limit_s: float) -> None:
    """Wait until the socket is readable, up to its timeout. See `call`."""
    pid, ran = process_behind(connection), time.monotonic()
    deadline = ran + (connection.gettimeout() or 0.0)
    while not select.select([connection], [], [], _LOOK_SECONDS)[0]:
        now = time.monotonic()
        if pid is None or not is_stopped(pid):
            ran = now
        elif now - ran > limit_s:
            raise RankError(f"{other} has been stopped for {limit_s:g} s")
        if now > deadline:
            raise TimeoutError


def _proof(token: bytes, *parts: bytes) -> bytes:
    return hmac.digest(token, b"".join(parts), "sha256")


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        data = connection.recv(count - len(found))
        if not data:
            raise ChannelClosedError("it hung up")
        found += data
    return found


def _prepared(connection: socket.socket) -> socket.socket:
    """Configure a socket: blocking, without Nagle's delay, with dead host detection."""
    connection.settimeout(None)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            limit = 1000 * _SILENCE_SECONDS
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
    return connection
