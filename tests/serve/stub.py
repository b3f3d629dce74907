"""The chat page on a server of scripted answers: a test says what a model writes, and when."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tilewright.serve.routes.page import ROUTES

CARD = {
    "id": "a-model",
    "max_model_len": 4096,
    "meta": {
        **{"precision": "stored (Q4_1, Q8_0)", "target": "cpu", "weights": "checkpoint"},
        "modalities": ["text", "image"],
    },
}
LAST = {
    "choices": [],
    "usage": {
        "prompt_tokens": 31,
        "completion_tokens": 57,
        "prompt_tokens_details": {"cached_tokens": 24},
    },
    "timings": {"predicted_per_second": 61.25},
}


@dataclass
class Stub:
    """``script``: what the next answers are made of, each a part of a choice's delta, or None where
    it waits until the test lets it ``go`` on.
    """

    port: int = 0
    script: list[dict[str, str] | None] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    num_left: int = 0
    go: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [CARD]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for delta in self.script:
                while delta is None and not self.go.is_set():
                    await asyncio.sleep(0.01)
                choice = {"index": 0, "delta": delta or {}, "finish_reason": None}
                await self._write(response, json.dumps({"choices": [choice]}))
            await self._write(response, json.dumps(LAST))
            await self._write(response, "[DONE]")
        except (ConnectionError, asyncio.CancelledError):
            self.num_left += 1
        return response

    async def _write(self, response: web.StreamResponse, data: str) -> None:
        await response.write(f"data: {data}\n\n".encode())


@contextmanager
def stub_server() -> Iterator[Stub]:
    """One that listens, in a thread of its own."""
    stub, loop = Stub(), asyncio.new_event_loop()
    app = web.Application()
    app.add_routes([web.route(*route) for route in ROUTES])
    app.add_routes([web.get("/v1/models", stub.models)])
    app.add_routes([web.post("/v1/chat/completions", stub.chat)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)

    async def begin() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        stub.port = runner.addresses[0][1]

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
    try:
        yield stub
    finally:
        stub.go.set()
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
