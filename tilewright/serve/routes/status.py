"""Whether the server serves, and how much it has served."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from tilewright.compiler import __version__
from tilewright.serve.metrics import OPEN_METRICS
from tilewright.serve.web.http_io import API_SERVER, Route, json_response


async def _health(request: web.Request) -> web.Response:
    front = request.app[API_SERVER]
    said: dict[str, Any] = {"status": front.health()}
    if len(front.client.engines) > 1:
        said |= {"replicas": len(front.client.engines), "missing": front.client.missing}
    if said["status"] == "ok":
        return json_response(said)
    return json_response(said, status=503, headers={"retry-after": "5"})


async def _live(request: web.Request) -> web.Response:
    return json_response({"status": "ok"})


async def _version(request: web.Request) -> web.Response:
    return json_response({"version": __version__})


async def _metrics(request: web.Request) -> web.Response:
    front = request.app[API_SERVER]
    is_open = "application/openmetrics-text" in request.headers.get("accept", "")
    data = front.metrics.render(front.client.engines, is_open=is_open)
    kind = OPEN_METRICS if is_open else "text/plain; version=0.0.4"
    return web.Response(body=data, headers={"content-type": kind})


ROUTES: list[Route] = [
    ("GET", "/health", _health),
    ("GET", "/v1/health", _health),
    ("GET", "/live", _live),
    ("GET", "/version", _version),
    ("GET", "/metrics", _metrics),
]
