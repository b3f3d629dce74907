"""Whether the server serves, and how much it has served."""

from __future__ import annotations

from aiohttp import web

from tilewright.compiler import __version__
from tilewright.compiler.serve.exchange import FRONT, Route, json_response
from tilewright.compiler.serve.metrics import OPEN_METRICS


async def _health(request: web.Request) -> web.Response:
    state = request.app[FRONT].health()
    if state == "ok":
        return json_response({"status": "ok"})
    return json_response({"status": state}, status=503, headers={"retry-after": "5"})


async def _live(request: web.Request) -> web.Response:
    return json_response({"status": "ok"})


async def _version(request: web.Request) -> web.Response:
    return json_response({"version": __version__})


async def _metrics(request: web.Request) -> web.Response:
    front = request.app[FRONT]
    client = front.client
    is_open = "application/openmetrics-text" in request.headers.get("accept", "")
    data = front.metrics.render(client.ready, client.beat, client.num_restarts, is_open=is_open)
    kind = OPEN_METRICS if is_open else "text/plain; version=0.0.4"
    return web.Response(body=data, headers={"content-type": kind})


ROUTES: list[Route] = [
    ("GET", "/health", _health),
    ("GET", "/v1/health", _health),
    ("GET", "/live", _live),
    ("GET", "/version", _version),
    ("GET", "/metrics", _metrics),
]
