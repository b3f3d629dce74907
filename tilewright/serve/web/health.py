"""Health check of a started server."""

from __future__ import annotations

import http.client


def is_healthy(host: str, port: int, *, timeout_s: float = 5.0) -> bool:
    """Return whether a local server answers ``GET /health`` with 200 within ``timeout_s``.

    ``host`` is the listening address. The loopback address replaces a wildcard address.
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
