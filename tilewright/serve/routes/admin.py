"""What an operator may ask, with ``--admin`` alone: who has a slot, and caches to be forgotten."""

from __future__ import annotations

from aiohttp import web

from tilewright.serve.web.http_io import API_SERVER, Route, json_response


async def _slots(request: web.Request) -> web.Response:
    """The requests under way, and how many slots there are."""
    front = request.app[API_SERVER]
    ready, _ = front.up()
    return json_response({"total_slots": ready.max_num_seqs, "requests": front.client.under_way()})


async def _reset_prefix_cache(request: web.Request) -> web.Response:
    """Forget what prompts could share; requests that run keep what they hold."""
    front = request.app[API_SERVER]
    front.up()
    front.client.forget_prefixes()
    return json_response({"status": "ok"})


ROUTES: list[Route] = [
    ("GET", "/slots", _slots),
    ("POST", "/reset_prefix_cache", _reset_prefix_cache),
]
