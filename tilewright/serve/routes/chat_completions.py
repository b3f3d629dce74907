"""Chats and completions: from a body to an answer, whole or streamed."""

from __future__ import annotations

from aiohttp import web

from tilewright.serve.web.http_io import (
    CLIENT,
    FRONT,
    HEADERS,
    ID,
    Route,
    ignored_fields,
    json_response,
    read_body,
)
from tilewright.serve.web.requests import ChatRequest, CompletionRequest, decode
from tilewright.serve.web.responses import Job
from tilewright.serve.web.streams import ChunkSpelling, Follower, answer_stream, answer_whole


async def _chat(request: web.Request) -> web.StreamResponse:
    return await _answer(request, *await _chat_job(request))


async def _completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, *await _completion_job(request))


async def _chat_job(request: web.Request) -> tuple[Job, dict[str, str]]:
    """What is asked, and the headers of the answer. The body is not kept while it waits."""
    front = request.app[FRONT]
    asked, ignored = decode(await read_body(request, front), ChatRequest)
    return await front.chat_job(asked), ignored_fields(ignored)


async def _completion_job(request: web.Request) -> tuple[Job, dict[str, str]]:
    front = request.app[FRONT]
    asked, ignored = decode(await read_body(request, front), CompletionRequest)
    return await front.completion_job(asked), ignored_fields(ignored)


async def _answer(request: web.Request, job: Job, headers: dict[str, str]) -> web.StreamResponse:
    front = request.app[FRONT]
    if job.unheld:
        headers["x-unconstrained-tools"] = job.unheld.encode("ascii", "replace").decode()[:500]
    job.client = request[CLIENT]
    follower = Follower(job, front.client, front.metrics, aside=front.aside, request_id=request[ID])
    if job.streams:
        common = request[HEADERS]
        headers |= common
        return await answer_stream(
            request,
            job,
            follower,
            aside=front.aside,
            settings=front.settings,
            headers=headers,
            spelling=ChunkSpelling(job),
        )
    return json_response(await answer_whole(job, follower, front.aside), headers=headers)


ROUTES: list[Route] = [
    ("POST", "/v1/chat/completions", _chat),
    ("POST", "/v1/completions", _completions),
]
