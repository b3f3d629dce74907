"""Whether a server answers: asked by those who wait for one that they have started."""

from __future__ import annotations

import http.client


def is_healthy(host: str, port: int, *, timeout_s: float = 5.0) -> bool:
    """Whether a server on this machine answers ``GET /health`` with 200 within ``timeout_s``.

    ``host`` is what it listens on; where that is every address, the machine's own is asked.
    """
    where = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(where, port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
