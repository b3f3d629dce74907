"""Reads request bodies with limits of size, type and time, and writes JSON responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import msgspec
from aiohttp import web

from tilewright.serve.api_server import ApiServer
from tilewright.serve.web.errors import ApiError
from tilewright.serve.web.settings import MAX_BODY

API_SERVER = web.AppKey("front", ApiServer)
ID = web.RequestKey("id", str)
CLIENT = web.RequestKey("client", str)
"""Number of the request's API key, empty without keys."""
HEADERS = web.RequestKey("headers", dict[str, str])
"""Response headers for the request."""
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Route: TypeAlias = tuple[str, str, Handler]
"""Method, path and handler."""


async def read_body(request: web.Request, front: ApiServer) -> bytes:
    """Read a JSON body within the limits. The request does not store it, because it may wait long.

    Raises:
        ApiError: 413, 415, or 408 for a slow body.
    """
    limit = front.max_body
    if request.content_length is not None and request.content_length > limit:
        raise too_large(limit)
    kind = request.headers.get("content-type")
    if kind is not None and kind.partition(";")[0].strip().lower() != "application/json":
        said = f"content-type {kind[:100]!r}; allowed: application/json"
        raise ApiError(415, "unsupported_media_type", said, closes=True)
    if request.headers.get("content-encoding", "identity") != "identity":
        said = "content-encoding: allowed: none"
        raise ApiError(415, "unsupported_media_type", said, closes=True)
    try:
        async with asyncio.timeout(front.settings.body_timeout):
            body = bytearray()
            while piece := await request.content.readany():
                body += piece
                if len(body) > limit:
                    raise too_large(limit)
            return bytes(body)
    except TimeoutError:
        seconds = front.settings.body_timeout
        said = f"the body took longer than {seconds:g} s"
        raise ApiError(408, "timeout", said, closes=True) from None


def json_response(
    body: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return web.Response(status=status, body=data, content_type="application/json", headers=headers)


def ignored_fields(fields: Sequence[str]) -> dict[str, str]:
    """Return the response header with a body's ignored fields."""
    if not fields:
        return {}
    names = [key if key.isascii() and key.isprintable() else "?" for key in fields]
    return {"x-ignored-fields": ", ".join(names)[:1000]}


def too_large(limit: int = MAX_BODY) -> ApiError:
    """Return the error for a large body. The connection closes, so that the rest is not read."""
    said = f"the body is too large; allowed: {limit} bytes"
    return ApiError(413, "too_large", said, closes=True)
