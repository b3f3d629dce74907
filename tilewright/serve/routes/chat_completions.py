"""Routes of chat and text completions, streamed or complete."""

from __future__ import annotations

from aiohttp import web

from tilewright.serve.web.http_io import (
    API_SERVER,
    CLIENT,
    Route,
    ignored_fields,
    read_body,
)
from tilewright.serve.web.requests import ChatRequest, CompletionRequest, decode
from tilewright.serve.web.responses import CompletionTask
from tilewright.serve.web.streams import ChunkSpelling, answer


async def _chat(request: web.Request) -> web.StreamResponse:
    return await _answer(request, *await _chat_job(request))


async def _completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, *await _completion_job(request))


async def _chat_job(request: web.Request) -> tuple[CompletionTask, dict[str, str]]:
    """Return the task and the response headers. The task does not contain the body."""
    front = request.app[API_SERVER]
    body, ignored = decode(await read_body(request, front), ChatRequest)
    return await front.chat_job(body), ignored_fields(ignored)


async def _completion_job(request: web.Request) -> tuple[CompletionTask, dict[str, str]]:
    front = request.app[API_SERVER]
    body, ignored = decode(await read_body(request, front), CompletionRequest)
    return await front.completion_job(body), ignored_fields(ignored)


async def _answer(
    request: web.Request, job: CompletionTask, headers: dict[str, str]
) -> web.StreamResponse:
    job.client = request[CLIENT]
    return await answer(request, job, ChunkSpelling(job), headers)


ROUTES: list[Route] = [
    ("POST", "/v1/chat/completions", _chat),
    ("POST", "/v1/completions", _completions),
]
