"""Images behind http URLs: named hosts, public addresses, and limits, against a real server."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tilewright.images.decode import ImageError
from tilewright.images.fetch import MediaHosts, is_public

BODY = b"x" * 5000
LIMIT, SECONDS = 10_000, 1.0


class Handler(BaseHTTPRequestHandler):
    """Answers by path."""

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("location", "/image")
            self.end_headers()
        elif self.path == "/slow":
            self._send(b"", len(BODY))
            for _ in range(100):
                time.sleep(0.1)
                self.wfile.write(b"x")
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(BODY)
        else:
            self._send(BODY, len(BODY) + (self.path == "/cut"))

    def _send(self, body: bytes, length: int) -> None:
        self.send_response(200)
        self.send_header("content-type", "image/png; x=y")
        self.send_header("content-length", str(length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Write no log."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            super().handle()


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def fetch(host: str, path: str, **options: Any) -> Any:
    given: dict[str, Any] = {"names": (host,), "accepts": lambda address: True, **options}
    hosts = MediaHosts(max_bytes=LIMIT, seconds=SECONDS, **given)
    return hosts.fetcher()(path if "://" in path else f"http://{host}{path}", "url")


def test_an_image_of_a_named_host_is_fetched(host: str) -> None:
    assert fetch(host, "/image?size=1") == (BODY, "image/png")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/moved", "status 302; allowed: 200, and no redirects"),
        ("/slow", r"over 1 s; allowed"),
        ("/endless", r"over 10000 bytes; allowed"),
        ("/cut", r"allowed: "),
        ("http://127.0.0.1:1/image", r"host '127.0.0.1:1'; allowed: 127"),
        ("http://example.org/image", r"host 'example.org'; allowed: 127"),
        ("ftp://example.org/image", r"scheme 'ftp'; allowed: data, http, https"),
        ("http://[::1/image", r"allowed: a URL of an image"),
        ("http://127.0.0.1:x/image", r"allowed: a URL of an image"),
        ("/a b\r\nx: y", r"allowed: a URL of an image"),
    ],
)
def test_a_fault_is_a_line_within_the_time_limit(path: str, message: str, host: str) -> None:
    began = time.monotonic()
    with pytest.raises(ImageError, match=message) as found:
        fetch(host, path)
    assert str(found.value).startswith("url: ") and "\n" not in str(found.value)
    assert time.monotonic() - began < 5 * SECONDS


def test_private_addresses_and_user_names_are_refused(host: str) -> None:
    with pytest.raises(ImageError, match="has a private address"):
        fetch(host, "/image", accepts=is_public)
    with pytest.raises(ImageError, match="host 'a:b@"):
        fetch(host, f"http://a:b@{host}/image")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "::1",
        "fe80::1%eth0",
        "::ffff:10.0.0.1",
        "0.0.0.0",
    ],
)
def test_these_addresses_are_private(address: str) -> None:
    assert not is_public(address) and is_public("8.8.8.8") and is_public("2606:4700::1111")
