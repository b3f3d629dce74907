"""The web application: all routes with common middleware."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiohttp import web

from tilewright.serve.api_server import ApiServer
from tilewright.serve.routes import (
    admin,
    embeddings,
    input_tokens,
    models,
    page,
    responses,
    status,
    tokens,
)
from tilewright.serve.routes import chat_completions as asking
from tilewright.serve.routes.schema import schema_route
from tilewright.serve.web.guard import guard
from tilewright.serve.web.http_io import API_SERVER, Route
from tilewright.serve.web.settings import MAX_IMAGE_BODY


def routes(*, has_admin: bool) -> list[Route]:
    """Return all routes."""
    entries = [
        *page.ROUTES,
        *status.ROUTES,
        *models.ROUTES,
        *asking.ROUTES,
        *responses.ROUTES,
        *input_tokens.ROUTES,
        *embeddings.ROUTES,
        *tokens.ROUTES,
        *(admin.ROUTES if has_admin else ()),
    ]
    return [*entries, schema_route(entries)]


def make_app(front: ApiServer) -> web.Application:
    """Return the web application for ``front``. The caller starts and closes ``front``."""
    app = web.Application(middlewares=[guard], client_max_size=MAX_IMAGE_BODY)
    app[API_SERVER] = front
    entries = routes(has_admin=front.settings.admin)
    paths = [path for _, path, _ in entries]
    for method, path, handler in entries:
        pattern = _without_names(path, paths)
        app.router.add_route(method, pattern, handler)
        if method == "GET":
            app.router.add_route("HEAD", pattern, handler)  # aiohttp leaves out the body
    return app


def _without_names(path: str, paths: Sequence[str]) -> str:
    """Return a path's pattern. ``{id}`` does not match the names of other paths."""
    parent, _, last = path.rpartition("/")
    names = sorted({p.rpartition("/")[2] for p in paths if p.rpartition("/")[0] == parent})
    names = [re.escape(name) for name in names if not name.startswith("{")]
    if last != "{id}" or not names:
        return path
    return f"{parent}/{{id:(?!(?:{'|'.join(names)})$)[^/]+}}"
