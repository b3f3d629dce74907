"""Chats and completions: from a body to an answer, whole or streamed."""

from __future__ import annotations

from aiohttp import web

from tilewright.compiler.serve.exchange import (
    CLIENT,
    FRONT,
    HEADERS,
    ID,
    Route,
    json_response,
    read_body,
)
from tilewright.compiler.serve.forms import Job
from tilewright.compiler.serve.front import Front
from tilewright.compiler.serve.requests import ChatRequest, CompletionRequest, decode
from tilewright.compiler.serve.streams import Follower, answer_stream, answer_whole


async def _chat(request: web.Request) -> web.StreamResponse:
    front = request.app[FRONT]
    body = await read_body(request, front)
    asked, ignored = decode(body, ChatRequest)
    return await _answer(request, front, await front.chat_job(asked), ignored)


async def _completions(request: web.Request) -> web.StreamResponse:
    front = request.app[FRONT]
    body = await read_body(request, front)
    asked, ignored = decode(body, CompletionRequest)
    return await _answer(request, front, await front.completion_job(asked), ignored)


async def _answer(
    request: web.Request, front: Front, job: Job, ignored: list[str]
) -> web.StreamResponse:
    headers: dict[str, str] = {}
    if ignored:
        names = [key if key.isascii() and key.isprintable() else "?" for key in ignored]
        headers["x-ignored-fields"] = ", ".join(names)[:1000]
    if job.unheld:
        headers["x-unconstrained-tools"] = job.unheld.encode("ascii", "replace").decode()[:500]
    job.client = request[CLIENT]
    follower = Follower(job, front.client, front.metrics, aside=front.aside, request_id=request[ID])
    if job.streams:
        common = request[HEADERS]
        headers |= common
        return await answer_stream(
            request, job, follower, aside=front.aside, settings=front.settings, headers=headers
        )
    return json_response(await answer_whole(job, follower, front.aside), headers=headers)


ROUTES: list[Route] = [
    ("POST", "/v1/chat/completions", _chat),
    ("POST", "/v1/completions", _completions),
]
