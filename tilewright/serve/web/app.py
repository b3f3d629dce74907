"""The HTTP face: all routes behind one guard."""

from __future__ import annotations

from aiohttp import web

from tilewright.serve.front import Front
from tilewright.serve.routes import admin, embeddings, models, page, responses, status, tokens
from tilewright.serve.routes import chat_completions as asking
from tilewright.serve.routes.schema import schema_route
from tilewright.serve.web.guard import guard
from tilewright.serve.web.http_io import FRONT, Route
from tilewright.serve.web.settings import MAX_BODY


def routes(*, has_admin: bool) -> list[Route]:
    """Every method and path that is answered."""
    found = [
        *page.ROUTES,
        *status.ROUTES,
        *models.ROUTES,
        *asking.ROUTES,
        *responses.ROUTES,
        *embeddings.ROUTES,
        *tokens.ROUTES,
        *(admin.ROUTES if has_admin else ()),
    ]
    return [*found, schema_route(found)]


def make_app(front: Front) -> web.Application:
    """Make the web application; its maker starts and ends ``front``."""
    app = web.Application(middlewares=[guard], client_max_size=MAX_BODY)
    app[FRONT] = front
    for method, path, handler in routes(has_admin=front.settings.has_admin):
        app.router.add_route(method, path, handler)
        if method == "GET":
            app.router.add_route("HEAD", path, handler)  # aiohttp leaves out the body
    return app
