"""Middleware of all handlers: request ids, access checks and error responses."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import secrets
from socket import gethostname
from urllib.parse import urlsplit

from aiohttp import web

from tilewright.serve.api_server import ApiServer
from tilewright.serve.routes.page import PAGE
from tilewright.serve.web.errors import ApiError
from tilewright.serve.web.http_io import API_SERVER, CLIENT, HEADERS, ID, Handler, too_large
from tilewright.serve.web.server_log import say, say_fault

_OPEN = frozenset(("/health", "/v1/health", "/live", *PAGE))
_NOT_HERE = {
    "/v1/messages": "use /v1/chat/completions",
    "/v1/images": "images are not made",
    "/v1/audio": "audio is neither read nor made",
    "/v1/load_lora_adapter": "adapters are not loaded",
    "/v1/unload_lora_adapter": "adapters are not loaded",
    "/lora-adapters": "adapters are not loaded",
    "/slots": "needs --admin",
    "/reset_prefix_cache": "needs --admin",
}
_EXPOSED = "x-request-id, x-ignored-fields, x-unconstrained-tools, retry-after, allow"
_PREFLIGHT = {
    "access-control-allow-methods": "DELETE, GET, HEAD, POST",
    "access-control-max-age": "7200",  # Chromium's maximum
    "vary": "origin, access-control-request-method, access-control-request-headers",
}
_REQUESTED_HEADERS = "access-control-request-headers"
_USUAL_HEADERS = ("authorization", "content-type", "x-request-id")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Assign a request id, check access, and convert errors to API errors."""
    front = request.app[API_SERVER]
    request[ID], request[CLIENT] = _request_id(request), ""
    request[HEADERS] = {"x-request-id": request[ID]}
    if front.settings.cors_origins:
        request[HEADERS]["vary"] = "origin"
    try:
        allowed_origin = _check_origin(request, front)
        if allowed_origin:
            request[HEADERS]["access-control-allow-origin"] = allowed_origin
            request[HEADERS]["access-control-expose-headers"] = _EXPOSED
        if allowed_origin and request.method == "OPTIONS":
            request[HEADERS] |= {
                **_PREFLIGHT,
                "access-control-allow-headers": _requested_headers(request),
            }
            response: web.StreamResponse = web.Response(status=204)
        else:
            _check_key(request, front)
            response = await handler(request)
    except ApiError as error:
        response = _refusal(front, error)
    except web.HTTPRequestEntityTooLarge:
        response = _refusal(front, too_large())
    except web.HTTPException as error:
        response = _refusal(front, _missing(request, error))
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:
        say_fault(error, f"{request.method} {request.path[:100]!r} {request[ID]}")
        response = _refusal(front, ApiError(500, "internal_error", "the server has a fault"))
    if response.status >= 500 and response.status != 503:
        say(f"{request.method} {request.path[:100]!r} {request[ID]}: {response.status}")
    if not response.prepared:
        response.headers.update(request[HEADERS])
    return response


def _request_id(request: web.Request) -> str:
    header = request.headers.get("x-request-id", "")
    is_good = 0 < len(header) <= 128 and header.isascii() and header.isprintable()
    return header if is_good else secrets.token_hex(16)


def _refusal(front: ApiServer, error: ApiError) -> web.Response:
    front.metrics.refuse(error.code)
    response = web.Response(
        status=error.status,
        body=error.body(),
        content_type="application/json",
        headers=error.headers,
    )
    if error.closes:
        response.force_close()
    return response


def _missing(request: web.Request, error: web.HTTPException) -> ApiError:
    path = request.path[:200]
    if error.status == 405:
        methods = ", ".join(error.headers.get("allow", "").split(","))
        said = f"{request.method} {path}; allowed: {methods}"
        return ApiError(405, "method_not_allowed", said, headers={"allow": methods})
    for begin, why in _NOT_HERE.items():
        if path == begin or path.startswith(begin + "/"):
            return ApiError(404, "not_found", f"{path}: {why}")
    if error.status == 404:
        return ApiError(404, "not_found", f"{path}: there is nothing here")
    return ApiError(error.status, "invalid_request", error.reason)


def _check_key(request: web.Request, front: ApiServer) -> None:
    keys = front.settings.api_key
    if not keys or request.path in _OPEN:
        return
    header = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
    fits = [hmac.compare_digest(header, f"Bearer {key}".encode()) for key in keys]
    if not any(fits):
        said = "authorization: not a key of this server; allowed: Bearer and one of its keys"
        raise ApiError(401, "invalid_api_key", said, headers={"www-authenticate": "Bearer"})
    request[CLIENT] = str(fits.index(True))


def _check_origin(request: web.Request, front: ApiServer) -> str:
    """Return the allowed foreign origin, empty for this server's pages and other clients."""
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    named = front.settings.cors_origins
    is_browser = origin is not None or "sec-fetch-site" in request.headers
    is_ours = _is_our_host(host, front.settings.host)
    is_named = bool({"*", f"http://{host}", f"https://{host}"} & set(named))
    if is_browser and not is_ours and not is_named:
        said = f"host {host[:100]!r}; allowed: this machine's own, and those of --cors-origins"
        raise ApiError(403, "origin", said)
    if origin is None or origin in (f"http://{host}", f"https://{host}"):
        return ""
    if origin in named or "*" in named:
        return origin
    said = f"origin {origin[:100]!r}; allowed: this server's own page and --cors-origins"
    raise ApiError(403, "origin", said)


def _is_our_host(host: str, bound: str) -> bool:
    """Return whether a browser's host name is this server's, against DNS rebinding.

    A server on a loopback address has loopback names only. Others have addresses and own names.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if _is_loopback(bound):
        return _is_loopback(name)
    return _is_address(name) or name in ("localhost", bound.lower(), gethostname().lower())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _requested_headers(request: web.Request) -> str:
    """Return the well-formed header names in a preflight request."""
    fields = request.headers.getall(_REQUESTED_HEADERS, ())
    names = [name.strip() for field in fields for name in field.split(",")]
    known = [name for name in names if _HEADER_NAME.fullmatch(name)]
    return ", ".join(known or _USUAL_HEADERS)
