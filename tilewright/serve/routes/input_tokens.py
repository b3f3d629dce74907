"""``POST /v1/responses/input_tokens``: a response's prompt length, without an output."""

from __future__ import annotations

from aiohttp import web

from tilewright.serve.responses.request import ResponsesRequest
from tilewright.serve.routes.responses import begin_response
from tilewright.serve.web.http_io import (
    API_SERVER,
    CLIENT,
    Route,
    ignored_fields,
    json_response,
    read_body,
)
from tilewright.serve.web.requests import decode


async def _input_tokens(request: web.Request) -> web.Response:
    front = request.app[API_SERVER]
    body, ignored = decode(await read_body(request, front), ResponsesRequest)
    job, _ = await begin_response(front, body, request[CLIENT])
    count = job.usage()["prompt_tokens"]
    reply = {"object": "response.input_tokens", "input_tokens": count}
    return json_response(reply, headers=ignored_fields(ignored))


ROUTES: list[Route] = [("POST", "/v1/responses/input_tokens", _input_tokens)]
