"""Sends a job's output to its client, complete or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol, TypeAlias

import msgspec
from aiohttp import HttpVersion11, web

from tilewright.runtime.messages import NewTokens, RequestFailed, RequestStarted
from tilewright.serve.api_server import ApiServer
from tilewright.serve.engines.request_tracker import Answer, RequestHandle
from tilewright.serve.output.choice import ChoiceStream, Scored
from tilewright.serve.output.reasoning import AnswerDelta, joined
from tilewright.serve.web.errors import ApiError
from tilewright.serve.web.http_io import API_SERVER, HEADERS, ID, json_response
from tilewright.serve.web.responses import CompletionTask
from tilewright.serve.web.server_log import say_fault

_EVENT, _END = b"data: ", b"\n\n"
_PING = b": ping\n\n"
_DONE = b"data: [DONE]\n\n"
_UNAVAILABLE = ("queue_timeout", "engine_down", "draining")
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
_HEADERS["x-accel-buffering"] = "no"
_LONG = 64  # scored tokens above which encoding runs in a thread
_CHARACTERS_A_SCORE = 64  # text that takes as long to tokenize as a score takes to encode
Updates: TypeAlias = dict[int, tuple[AnswerDelta, list[Scored]]]
"""New text and log probabilities by choice."""


class AnswerStreamer:
    """Follows a job's output.

    Raises:
        ApiError: from `updates`, if the engine fails a choice.
    """

    __slots__ = (
        *("_aside", "_began", "_client", "_job", "_last", "_metrics"),
        *("_num_left", "_num_shown", "_of", "_request_id"),
    )

    def __init__(self, job: CompletionTask, front: ApiServer, request_id: str) -> None:
        self._job, self._client, self._metrics = job, front.client, front.metrics
        self._of = [front.metrics.of(0)] * len(job.choices)  # until an engine starts them
        self._aside, self._request_id = front.aside, request_id
        self._num_shown = [0] * len(job.choices)
        self._began = time.perf_counter()
        self._last: list[float | None] = [None] * len(job.choices)
        self._num_left = len(job.choices)

    async def updates(
        self, ping_seconds: float | None = None
    ) -> AsyncGenerator[Updates | None, None]:
        """Yield the new output of all choices together, or None after ``ping_seconds`` without any.

        The end of the iteration cancels unfinished requests.
        """
        job = self._job
        handle = self._client.submit([choice.request for choice in job.choices], client=job.client)
        try:
            while self._num_left:
                messages = await handle.take(ping_seconds)
                if not messages:
                    yield None
                    continue
                updates: Updates = {}
                for index, message in messages:
                    choice = job.choices[index]
                    if choice.awaits_echo and isinstance(message, NewTokens):
                        size = _CHARACTERS_A_SCORE * len(choice.request.prompt)
                        await self._aside(size, choice.score_prompt, message.echo)
                    self._take(index, message, handle, updates)
                if updates:
                    yield updates
        finally:
            handle.close()

    def _take(
        self,
        index: int,
        message: Answer,
        handle: RequestHandle,
        updates: Updates,
    ) -> None:
        choice = self._job.choices[index]
        if choice.finish_reason is not None:
            return  # output after a stop string
        if isinstance(message, NewTokens):
            self._time(index, len(message.tokens))
            piece = choice.push(message)
            if choice.finish_reason is not None:
                choice.finished = handle.cancel(index)
        elif isinstance(message, RequestStarted):
            choice.started = choice.started or message
            self._of[index] = self._metrics.of(handle.engines[index])
            return
        elif isinstance(message, RequestFailed):
            raise error_of(message)
        else:
            choice.finished = message
            piece = choice.end(message.reason)
        if choice.finish_reason is not None:
            self._ended(index, choice)
        if index in updates:
            before, scored = updates[index]
            piece = joined([before, piece])
        else:
            scored = []
        if len(choice.scored) > (known := self._num_shown[index]):
            scored = scored + choice.scored[known:]
            self._num_shown[index] = len(choice.scored)
        updates[index] = piece, scored

    def _time(self, index: int, count: int) -> None:
        now, last = time.perf_counter(), self._last[index]
        if last is None:
            self._of[index].first.observe(now - self._began)
        else:
            self._of[index].between.observe((now - last) / count)
        self._last[index] = now

    def _ended(self, index: int, choice: ChoiceStream) -> None:
        self._num_left -= 1
        seconds = time.perf_counter() - self._began
        self._of[index].take(choice, seconds=seconds, request_id=self._request_id)
        if index % self._job.n == 0:  # the choices of a prompt count as a single request
            length = len(choice.request.prompt)
            cached = choice.started.num_cached if choice.started is not None else 0
            self._of[index].take_prompt(length, cached, num_choices=self._job.n)


def error_of(message: RequestFailed) -> ApiError:
    """Return the error for a failed request."""
    status = 503 if message.code in _UNAVAILABLE else 500
    after = {"retry-after": "5"} if status == 503 else None
    return ApiError(status, message.code, message.message, headers=after)


async def answer(
    request: web.Request, job: CompletionTask, spelling: Spelling, headers: dict[str, str]
) -> web.StreamResponse:
    """Run a job, and send its output complete or as a stream."""
    front = request.app[API_SERVER]
    if job.unconstrained:
        headers["x-unconstrained-tools"] = job.unconstrained.encode("ascii", "replace").decode()[
            :500
        ]
    follower = AnswerStreamer(job, front, request[ID])
    if job.streams:
        return await answer_stream(request, job, follower, spelling, headers | request[HEADERS])
    async with aclosing(follower.updates()) as updates:
        async for new in updates:
            spelling.take(new or {})
    spelling.finish()
    num_scored = sum(len(choice.scored) for choice in job.choices)
    body = await front.aside(_CHARACTERS_A_SCORE * num_scored, _spelled, spelling)
    return json_response(body, headers=headers)


def _spelled(spelling: Spelling) -> bytes:
    return msgspec.json.encode(spelling.whole())


class Spelling(Protocol):
    """The body of an output, or the bytes of a stream's events."""

    def take(self, new: Updates) -> object:
        """Add new output to the body."""

    def finish(self) -> object:
        """End the body."""

    def whole(self) -> dict[str, Any]:
        """Return the body."""

    def chunks(self, updates: Updates) -> bytes:
        """Return the events of new output."""

    def tail(self) -> bytes:
        """Return the events after the last output."""

    def fault(self, error: ApiError) -> bytes:
        """Return the events of an error that ends the stream."""


class ChunkSpelling:
    """The bodies and chunks of chats and completions."""

    def __init__(self, job: CompletionTask) -> None:
        self._job = job
        self.whole = job.whole

    def take(self, new: Updates) -> None:
        """Do nothing: the job has the output."""

    def finish(self) -> None:
        """Do nothing: the job has the output."""

    def chunks(self, updates: Updates) -> bytes:
        return _chunks(self._job, updates)

    def tail(self) -> bytes:
        usage = _event(self._job.usage_chunk()) if self._job.include_usage else b""
        return usage + _DONE

    def fault(self, error: ApiError) -> bytes:
        return _EVENT + error.body() + _END


async def answer_stream(
    request: web.Request,
    job: CompletionTask,
    follower: AnswerStreamer,
    spelling: Spelling,
    headers: dict[str, str],
) -> web.StreamResponse:
    """Send chunks at once. The headers precede the first chunk or ping."""
    front = request.app[API_SERVER]
    response: web.StreamResponse | None = None  # saves memory while a request waits

    async def write(data: bytes) -> None:
        nonlocal response
        if response is None:
            response = web.StreamResponse(headers={**_HEADERS, **headers})
            if request.version >= HttpVersion11:
                response.enable_chunked_encoding()
            else:
                response.force_close()  # HTTP/1.0 has no chunks, the body ends at the close
            await response.prepare(request)
        await response.write(data)

    try:
        async with aclosing(follower.updates(front.settings.ping_seconds)) as updates:
            async for update in updates:
                if update is None:
                    data = _PING
                elif job.num_top is not None and (count := _num_scored(update)) > _LONG:
                    data = await front.aside(_CHARACTERS_A_SCORE * count, spelling.chunks, update)
                else:
                    data = spelling.chunks(update)
                if data:
                    await (write(data) if response is None else response.write(data))
        await write(spelling.tail())
    except ApiError as error:
        if response is None:
            raise
        await write(spelling.fault(error))
    except Exception as error:  # a second response must not follow the first bytes
        if response is None or not response.prepared or isinstance(error, ConnectionError):
            raise
        say_fault(error, f"a stream {request[ID]}")
        fault = ApiError(500, "internal_error", "the server has a fault")
        await write(spelling.fault(fault))
    assert response is not None, "every stream has an end"
    await response.write_eof()
    return response


def _num_scored(updates: Updates) -> int:
    return sum(len(scored) for _, scored in updates.values())


def _chunks(job: CompletionTask, updates: Updates) -> bytes:
    """Return the events of new output for a single write."""
    data = b""
    for index, (piece, scored) in updates.items():
        has_ended = job.choices[index].finish_reason is not None
        if piece.is_content and (plain := job.plain_chunk(index, piece.content)) is not None:
            data += _EVENT + plain + _END
            if has_ended:
                data += _event(job.last_chunk(index))
            continue
        is_unopened = index not in job.opened
        if piece or scored or (has_ended and is_unopened):
            data += _event(job.chunk(index, piece, scored))
        if has_ended:
            data += _event(job.last_chunk(index))
    return data


def _event(body: dict[str, object]) -> bytes:
    return _EVENT + msgspec.json.encode(body) + _END
