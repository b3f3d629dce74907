"""Client for load tests: completions, streamed or whole, with arrival times.

Works with any server that has OpenAI's API for completion streams.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from tilewright.errors import TilewrightError

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_FLUSH = "/reset_prefix_cache"
_HEAD = b"data: "
_DONE = b"data: [DONE]"
_PATIENCE_SECONDS = 600.0
_JSON = {"content-type": "application/json"}


@dataclass(slots=True)
class ResponseTiming:
    """A received response and its times.

    Attributes:
        began: Start of the request, by this process's clock in seconds.
        times: Seconds from the start to each chunk with text.
        ended: Seconds from the start to the response's end.
        count: Output tokens, as counted by the server.
        num_prompt: Prompt tokens.
        num_cached: Prompt tokens from the prefix cache.
        text: The output.
        error: Error message. Empty: complete.
    """

    began: float = 0.0
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    count: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    text: str = ""
    error: str = ""

    @property
    def first(self) -> float:
        """Time to the first chunk (TTFT) in seconds."""
        return self.times[0]

    @property
    def per_token(self) -> float:
        """Mean time for a token after the first (TPOT) in seconds."""
        return (self.times[-1] - self.times[0]) / max(1, self.count - 1)

    def gaps(self) -> list[float]:
        """Return the seconds between chunks (ITL), divided by the mean token count in a
        chunk.
        """
        share = max(1.0, (self.count - 1) / max(1, len(self.times) - 1))
        ends = zip(self.times, self.times[1:], strict=False)
        return [(after - before) / share for before, after in ends]

    def take_usage(self, usage: dict[str, Any]) -> None:
        """Store the token counts from the last chunk."""
        self.count, self.num_prompt = usage["completion_tokens"], usage["prompt_tokens"]
        self.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class Client:
    """Client of one server in a load test."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session, self.url, self._model = session, url, model

    async def stream(
        self, path: str, body: dict[str, Any], most: int | None = None
    ) -> ResponseTiming:
        """Send a request and receive the stream. Close the connection after ``most`` chunks with
        text.
        """
        options = {"stream": True, "stream_options": {"include_usage": True}}
        heard = ResponseTiming(began=time.perf_counter())
        try:
            async with self._post(path, {**body, **options}) as answer:
                if answer.status != 200:
                    heard.error = f"status {answer.status}: {(await answer.text())[:200]}"
                    return heard
                has_ended, rest = False, b""
                async for data in answer.content.iter_any():  # reading by lines takes twice as long
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        if line.startswith(_DONE):
                            has_ended = True
                        elif line.startswith(_HEAD):
                            has_ended = _take(heard, line) or has_ended
                        if most is not None and len(heard.times) >= most:
                            return heard
                    if has_ended:  # ik_llama.cpp's server may leave the connection open
                        break
                is_whole = has_ended and (heard.times or heard.count)
                heard.error = heard.error or ("" if is_whole else "no whole answer")
                heard.ended = time.perf_counter() - heard.began
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            heard.error = str(error) or type(error).__name__
        return heard

    async def whole(self, path: str, body: dict[str, Any]) -> ResponseTiming:
        """Send a request without streaming. The only time is the response's end."""
        heard = ResponseTiming(began=time.perf_counter())
        try:
            async with self._post(path, body) as answer:
                response = msgspec.json.decode(await answer.read())
                if answer.status != 200:
                    heard.error = f"status {answer.status}: {str(response)[:200]}"
                    return heard
                choice = response["choices"][0]
                heard.text = choice["text"] if "text" in choice else choice["message"]["content"]
                heard.take_usage(response["usage"])
                heard.times.append(time.perf_counter() - heard.began)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            heard.error = str(error) or type(error).__name__
        return heard

    async def fetch(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return a JSON response: to a POST with ``body``, or to a GET without."""
        options = self._session.get(self.url + path) if body is None else self._post(path, body)
        async with options as answer:
            return msgspec.json.decode(await answer.read())

    async def status(self, path: str, data: bytes) -> int:
        """Post bytes, which may be invalid JSON, and return the HTTP status."""
        async with self._session.post(self.url + path, data=data, headers=_JSON) as answer:
            await answer.read()
            return answer.status

    async def wait_until_ready(self, seconds: float) -> None:
        """Wait while the server loads.

        Return at once if there is no server or no ``/health``: later requests report the error.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                async with self._session.get(f"{self.url}/health") as answer:
                    if answer.status != 503:
                        return
            except aiohttp.ClientError:
                return
            await asyncio.sleep(0.1)

    async def take_model(self) -> None:
        """Select the server's first model for later requests, or ``model`` if none is
        listed.
        """
        response = await self.fetch("/v1/models")
        names = [each.get("id") for each in response.get("data", []) if isinstance(each, dict)]
        self._model = next(iter(names), None) or "model"

    async def metrics(self) -> dict[str, float]:
        """Return the server's metrics by name without prefix, summed over labels.

        The labels ``part``, ``kind`` and ``code`` remain part of the name.
        """
        async with self._session.get(f"{self.url}/metrics") as answer:
            return read_metrics(await answer.text())

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """Post a body with msgspec's encoder. A slow encoder would delay the stream receipt."""
        data = msgspec.json.encode({"model": self._model, **body})
        return self._session.post(self.url + path, data=data, headers=_JSON)


def read_metrics(text: str) -> dict[str, float]:
    """Parse Prometheus text as :meth:`Client.metrics`, without buckets."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or "_bucket{" in line or " " not in line:
            continue
        spelt, _, value = line.rpartition(" ")
        name, _, labels = spelt.partition("{")
        name = name.partition(":")[2] or name
        for label in labels.rstrip("}").split(","):
            key, _, said = label.partition("=")
            if key in ("part", "kind", "code"):
                name += f"[{said.strip(chr(34))}]"
        found[name] = found.get(name, 0.0) + float(value)
    return found


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _StreamDelta(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None
    delta: _Delta | None = None


class _StreamEvent(msgspec.Struct):
    choices: list[_StreamDelta] = []
    usage: dict[str, Any] | None = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_StreamEvent)  # fields without a name here are skipped


def _take(heard: ResponseTiming, line: bytes) -> bool:
    """Store a chunk. Return whether it is the last: usage, and every choice is finished."""
    event = _EVENT.decode(line.removeprefix(_HEAD))
    if event.error is not None:
        heard.error = str(event.error)
        return False
    text = "".join([choice.text or _said(choice.delta) for choice in event.choices])
    if text:
        heard.times.append(time.perf_counter() - heard.began)
        heard.text += text
    if not event.usage:
        return False
    heard.take_usage(event.usage)
    return all(choice.finish_reason for choice in event.choices)


def _said(delta: _Delta | None) -> str:
    return (delta.content or delta.reasoning_content or "") if delta is not None else ""


@asynccontextmanager
async def connected(url: str, model: str) -> AsyncIterator[Client]:
    """Yield a client for the server at ``url`` with ``model``."""
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_SECONDS)
    # llama.cpp's server closes connections while a second request arrives
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield Client(session, url.rstrip("/"), model)


async def flush(client: Client) -> None:
    """Clear a server's prefix cache.

    Raises:
        TilewrightError: The server does not allow it.
    """
    if (said := await client.status(_FLUSH, b"")) != 200:
        raise TilewrightError(f"{_FLUSH}: HTTP {said}; --flush wants a server with --admin")


async def at_most(
    limit: int, jobs: Sequence[Callable[[], Awaitable[ResponseTiming]]]
) -> tuple[list[ResponseTiming], float]:
    """Run jobs, ``limit`` at a time (closed loop). Return the results and the total seconds."""
    gate = asyncio.Semaphore(limit)

    async def run(job: Callable[[], Awaitable[ResponseTiming]]) -> ResponseTiming:
        async with gate:
            return await job()

    began = time.perf_counter()
    found = await asyncio.gather(*(run(job) for job in jobs))
    return list(found), time.perf_counter() - began


async def arriving(
    rate: float, seed: int, jobs: Sequence[Callable[[], Awaitable[ResponseTiming]]]
) -> tuple[list[ResponseTiming], float]:
    """Run jobs in an open loop with ``rate`` starts a second (Poisson). See :func:`at_most`."""
    chooser, at = random.Random(seed), 0.0

    async def run(job: Callable[[], Awaitable[ResponseTiming]], after: float) -> ResponseTiming:
        await asyncio.sleep(after)
        return await job()

    began, waiting = time.perf_counter(), []
    for job in jobs:
        at += chooser.expovariate(rate)
        waiting.append(run(job, at))
    found = await asyncio.gather(*waiting)
    return list(found), time.perf_counter() - began
