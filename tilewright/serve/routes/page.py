"""The chat page: its files, and what a browser may do with them."""

from __future__ import annotations

from importlib.resources import files

from aiohttp import web

from tilewright.serve.web.http_io import Route

PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/markdown.js": ("markdown.js", "text/javascript"),
}
"""The file and its kind by path. Whoever has no key may read them."""
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def _page(request: web.Request) -> web.Response:
    name, kind = PAGE[request.path]
    data = files("tilewright.serve").joinpath("page", name).read_bytes()
    headers = {"content-security-policy": _CSP, "x-content-type-options": "nosniff"}
    headers |= {"referrer-policy": "no-referrer", "cache-control": "no-cache"}
    return web.Response(body=data, content_type=kind, charset="utf-8", headers=headers)


ROUTES: list[Route] = [("GET", path, _page) for path in PAGE]
