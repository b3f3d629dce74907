"""Routes for operators with ``--admin``: running requests, and clearing of caches."""

from __future__ import annotations

from aiohttp import web

from tilewright.serve.web.http_io import API_SERVER, Route, json_response


async def _slots(request: web.Request) -> web.Response:
    """Return the pending requests and the number of slots."""
    front = request.app[API_SERVER]
    ready, _ = front.up()
    return json_response({"total_slots": ready.max_num_seqs, "requests": front.client.under_way()})


async def _reset_prefix_cache(request: web.Request) -> web.Response:
    """Clear the prefix cache. Running requests are unchanged."""
    front = request.app[API_SERVER]
    front.up()
    front.client.forget_prefixes()
    return json_response({"status": "ok"})


ROUTES: list[Route] = [
    ("GET", "/slots", _slots),
    ("POST", "/reset_prefix_cache", _reset_prefix_cache),
]
