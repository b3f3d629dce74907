"""``/openapi.json``, generated from the types of decoded bodies."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from tilewright.compiler import __version__
from tilewright.serve.responses.request import ResponsesRequest
from tilewright.serve.routes.embeddings import EmbeddingRequest
from tilewright.serve.routes.page import PAGE
from tilewright.serve.web.http_io import Route, json_response
from tilewright.serve.web.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TemplateRequest,
    TokenizeRequest,
)

_BODIES: dict[str, type] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": ResponsesRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/apply-template": TemplateRequest,
}
_STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_JSON, _EVENTS = "application/json", "text/event-stream"
_OTHER_KINDS = {"/metrics": "text/plain"} | {path: kind for path, (_, kind) in PAGE.items()}
_REFUSALS = {
    400: "a value is not allowed; param names it",
    401: "no key of this server",
    403: "a foreign page asks",
    404: "there is nothing here",
    408: "the body took too long",
    413: "the body is too large",
    415: "another content type than JSON",
    429: "too much waits already; retry-after says how long to wait",
    500: "the engine failed",
    503: "loading, draining, or without an engine",
}


class Fault(msgspec.Struct, frozen=True):
    """Why a request was refused, in one sentence; ``param`` names the field."""

    message: str
    type: str
    param: str | None
    code: str


class Error(msgspec.Struct, frozen=True):
    """The body of every answer with a status of 400 and above."""

    error: Fault


def document(routes: list[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document for these routes."""
    kinds = [*_BODIES.values(), Error]
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    named = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler in routes:
        plain = path.replace("{id:.+}", "{id}")
        operation = _operation(path, handler.__doc__ or handler.__name__.strip("_"), named)
        paths.setdefault(plain, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tilewright", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(path: str, summary: str, named: dict[type, Any]) -> dict[str, Any]:
    kind = _OTHER_KINDS.get(path, _JSON)
    content: dict[str, Any] = {kind: {"schema": {"type": "object"} if kind == _JSON else {}}}
    if path in _STREAMS:
        content[_EVENTS] = {"schema": {"type": "string"}}
    answers: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    for status, said in _REFUSALS.items():
        schema = {"schema": named[Error]}
        answers[str(status)] = {"description": said, "content": {_JSON: schema}}
    operation: dict[str, Any] = {"summary": summary, "responses": answers}
    if path in _BODIES:
        body = {_JSON: {"schema": named[_BODIES[path]]}}
        operation["requestBody"] = {"required": True, "content": body}
    if "{id" in path:
        operation["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation


def schema_route(routes: list[Route]) -> Route:
    """Return the route that documents ``routes`` and itself."""

    async def answer(request: web.Request) -> web.Response:
        """Answer with this document."""
        return json_response(body)

    route: Route = ("GET", "/openapi.json", answer)
    body = msgspec.json.encode(document([*routes, route]))
    return route
