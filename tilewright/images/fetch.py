"""Images behind http URLs: named hosts, public addresses, no redirects, size and time limits."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from tilewright.errors import allowed
from tilewright.images.decode import ImageError
from tilewright.images.parts import Fetch

MEDIA_SECONDS = 5.0
"""Maximum time for all images of a request."""

_PORTS = {"http": 80, "https": 443}
_PIECE = 1 << 16


def is_public(address: str) -> bool:
    """Return whether an address belongs to the public internet."""
    number = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(number, "ipv4_mapped", None)
    return (mapped or number).is_global and not number.is_multicast


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaHosts:
    """Hosts with images.

    Attributes:
        names: Host names, ``example.org`` or ``example.org:8080``.
        max_bytes: Maximum image size.
        seconds: Maximum time for all images of a request.
        accepts: Returns whether an address may be connected to.
    """

    names: tuple[str, ...]
    max_bytes: int
    seconds: float = MEDIA_SECONDS
    accepts: Callable[[str], bool] = is_public

    def fetcher(self) -> Fetch:
        """Return a function for a request's images."""
        deadline = time.monotonic() + self.seconds
        return lambda url, where: self._fetch(url, where, deadline)

    def _fetch(self, url: str, where: str, deadline: float) -> tuple[bytes, str | None]:
        """Return the bytes and the MIME type behind a URL.

        Raises:
            ImageError: The host is not allowed, or the response is not an image in the limits.
        """
        try:
            parts = urlsplit(url)
            self._check(parts, where)
            result = self._read(parts, where, deadline)
            if time.monotonic() >= deadline:  # the watchdog may have cut it short
                raise ValueError("late")
            return result
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = str(error).partition("\n")[0] or "no response"
            if time.monotonic() >= deadline:
                reason = f"over {self.seconds:g} s"
            raise ImageError(f"{where}: {reason[:200]}; allowed: a URL of an image") from None

    def _check(self, parts: SplitResult, where: str) -> None:
        if parts.scheme not in _PORTS:
            said = f"{where}: scheme {parts.scheme[:20]!r}; {allowed(('data', *_PORTS))}"
            raise ImageError(said, "unsupported")
        host, default = (parts.hostname or "").lower(), _PORTS[parts.scheme]
        port = parts.port or default
        is_named = f"{host}:{port}" in self.names or (host in self.names and port == default)
        if not is_named or "@" in parts.netloc:
            said = f"{where}: host {parts.netloc[:100]!r}; {allowed(self.names)}"
            raise ImageError(said, "unsupported")

    def _read(self, parts: SplitResult, where: str, deadline: float) -> tuple[bytes, str | None]:
        host, is_secure = parts.hostname or "", parts.scheme == "https"
        port = parts.port or _PORTS[parts.scheme]
        left = max(0.01, deadline - time.monotonic())
        connection = http.client.HTTPConnection(host, port, timeout=left)
        with contextlib.closing(connection), self._connected(host, port, left, where) as plain:
            # A connection to the checked address: a second look-up could give another.
            connection.sock = plain
            if is_secure:
                context = ssl.create_default_context()
                connection.sock = context.wrap_socket(plain, server_hostname=host)
            watchdog = threading.Timer(left, _shut, (connection.sock,))
            watchdog.daemon = True
            watchdog.start()
            try:
                target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                connection.request("GET", target, headers={"Accept": "image/*"})
                return self._body(connection.getresponse(), where)
            finally:
                watchdog.cancel()

    def _connected(self, host: str, port: int, left: float, where: str) -> socket.socket:
        """Connect to a host's first address. All addresses must be accepted."""
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in entries]
        if not all(map(self.accepts, addresses)):
            raise ImageError(
                f"{where}: host {host[:100]!r} has a private address; allowed: public addresses",
                "unsupported",
            )
        return socket.create_connection((addresses[0], port), timeout=left)

    def _body(self, response: http.client.HTTPResponse, where: str) -> tuple[bytes, str | None]:
        if response.status != 200:
            raise ImageError(f"{where}: status {response.status}; allowed: 200, and no redirects")
        data = bytearray()
        while piece := response.read1(_PIECE):
            data += piece
            if len(data) > self.max_bytes:
                raise ImageError(f"{where}: over {self.max_bytes} bytes; allowed: a smaller file")
        if response.length:
            raise ValueError("the response is cut short")
        mime_type = (response.getheader("content-type") or "").partition(";")[0].strip().lower()
        return bytes(data), mime_type if mime_type.startswith("image/") else None


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
