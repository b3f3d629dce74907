"""The API server's client of its engine processes.

Sends requests, receives messages, and continues after an engine's end. Knows token ids and
messages. Callers know texts and HTTP, `EngineProcess` knows processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from tilewright.errors import ConfigError
from tilewright.runtime.memory.pages import chain_keys
from tilewright.runtime.messages import (
    EngineReady,
    EngineStarting,
    NewTokens,
    ResetPrefixCache,
    ToEngine,
)
from tilewright.runtime.pooling import MEAN
from tilewright.runtime.request import EngineRequest
from tilewright.serve.engines.process import DOWN, LOADING, READY, EngineProcess
from tilewright.serve.engines.request_tracker import Answer, RequestHandle, RequestTracker
from tilewright.serve.engines.routing import ReplicaRouter
from tilewright.serve.engines.run_folders import MeetingFolder
from tilewright.serve.web.errors import ApiError
from tilewright.serve.web.server_log import say
from tilewright.serve.web.settings import ServerConfig
from tilewright.utils.status_line import StatusLine

TOKENIZER = "tokenizer"
"""Name of the directory in which the engine saves its tokenizer for the API server."""

_PAGE = 64
"""Tokens of a page for prefix keys, if an engine has no pages."""


class EngineClient:
    """Starts the engine processes, sends requests to them, and restarts them.

    Requests are accepted after all engines have started, until the last engine is gone. If an
    engine dies, its running requests fail and its waiting requests go to another engine.

    Args:
        command: arguments after ``python``. ``{}`` is the engine's directory.
        on_ready: receives the number of an engine, its directory and its properties after each
            start. An exception ends that engine.
        settings: engine resources, queue limits and timeouts.

    Attributes:
        ready: properties of all engines together. Slots, pages and bytes are sums, lengths are
            minima.
        ended: completes with an exit code and a reason after the last engine is gone.
    """

    def __init__(
        self,
        command: Sequence[str],
        on_ready: Callable[[int, Path, EngineReady], Awaitable[None]],
        settings: ServerConfig,
    ) -> None:
        self.ready: EngineReady | None = None
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._on_ready = on_ready
        replicas = settings.engines
        router = ReplicaRouter(len(replicas))
        self._tracker = RequestTracker(self._place, self._send, router, settings)
        self._has_begun, self._status = False, StatusLine()
        self._beginning = asyncio.Lock()
        self._folder = MeetingFolder()
        self.engines = tuple(
            EngineProcess(
                number,
                f"replica {number}" if len(replicas) > 1 else "the engine",
                command,
                replica,
                folder=self._folder.path / str(number),
                listener=self,
                hung_seconds=settings.hung_seconds,
            )
            for number, replica in enumerate(replicas)
        )

    @property
    def state(self) -> str:
        """Return ``loading``, ``ready`` or ``down``.

        ``loading`` lasts until all engines have started, or while a restart is the only chance.
        ``ready`` needs a running engine. ``down`` is final.
        """
        states = [engine.state for engine in self.engines]
        if self.ended.done() or not {LOADING, READY}.intersection(states):
            return DOWN
        return READY if self._has_begun and READY in states else LOADING

    @property
    def is_healthy(self) -> bool:
        """Return whether requests are accepted and an engine has sent a recent heartbeat."""
        return self.state == READY and any(engine.is_healthy for engine in self.engines)

    @property
    def missing(self) -> list[int]:
        """Return the numbers of engines that are not ready or have no recent heartbeat."""
        return [engine.number for engine in self.engines if not engine.is_healthy]

    @property
    def num_live(self) -> int:
        """Return the number of waiting and running requests."""
        return len(self._tracker)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that no engine has started."""
        return self._tracker.num_waiting

    @property
    def num_restarts(self) -> int:
        """Return the number of restarts of all engines."""
        return sum(engine.num_restarts for engine in self.engines)

    def start(self) -> None:
        """Start the engines. Requests are accepted after all are ready."""
        for engine in self.engines:
            engine.start()

    async def close(self) -> None:
        """End the engine processes, first by message, and remove their directory."""
        self._status.clear()
        await asyncio.gather(*(engine.close() for engine in self.engines))
        self._folder.remove()

    def submit(self, requests: Sequence[EngineRequest], *, client: str = "") -> RequestHandle:
        """Submit requests that fit the context. ``client`` names the sender.

        Raises:
            ApiError: 503 without an engine, 429 with a full queue.
        """
        if (state := self.state) != READY or self.ready is None:
            code = "loading" if state == LOADING else "engine_down"
            raise ApiError(503, code, f"the engine is {state}", headers={"retry-after": "5"})
        return self._tracker.submit(requests, client=client, max_context=self.ready.max_context)

    def under_way(self) -> list[dict[str, object]]:
        """Return the facts about each request for an operator, without texts."""
        return self._tracker.under_way()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache of all engines."""
        self._tracker.router.forget()
        for engine in self.engines:
            engine.give(ResetPrefixCache())

    def fail_all(self, code: str, message: str) -> None:
        """Fail all pending requests with a code and a message."""
        self._tracker.fail_all(code, message)

    async def begin(self, engine: int, folder: Path, ready: EngineReady) -> None:
        """See `EngineEvents`. One engine at a time, because the first brings the tokenizer.

        Raises:
            ConfigError: if the engine serves another model or other settings than the running
                engines. Clients could not see the difference in a fingerprint.
        """
        async with self._beginning:
            others = [each for each in self.engines if each.number != engine]
            for known in (other.ready for other in others if other.ready and other.state != DOWN):
                _check_alike(self.engines[engine].name, ready, known)
            await self._on_ready(engine, folder, ready)

    def starting(self, engine: int, message: EngineStarting) -> None:
        """See `EngineEvents`."""
        loading = [process.number for process in self.engines if process.state == LOADING]
        if loading[:1] != [engine]:  # replicas do the same work
            return
        if message.total:
            self._status.progress(message.text, message.done, message.total)
        else:
            self._status.clear()
            say(message.text)

    def began(self, engine: int) -> None:
        """See `EngineEvents`."""
        self._status.clear()
        known = [each.ready for each in self.engines if each.ready is not None]
        self.ready = _together(known)
        self._has_begun |= all(each.state == READY for each in self.engines)
        self._start_waiting()

    def on_message(self, engine: int, message: Answer) -> None:
        """See `EngineEvents`."""
        if isinstance(message, NewTokens):  # the most frequent message
            self._tracker.on_message(message)
            return
        num_running = sum(each.beat.num_running for each in self.engines)
        self._tracker.on_message(message, num_running, engine=engine)

    def lost(self, engine: int, said: str) -> None:
        """See `EngineEvents`."""
        self._tracker.fail_started(engine, said)
        self._start_waiting()

    def gone(self, engine: int, said: str) -> None:
        """See `EngineEvents`."""
        self._status.clear()
        reason = said.partition(" ")[2]
        if self._has_begun and any(each.state != DOWN for each in self.engines):
            self.lost(engine, reason)
            say(f"{reason}; the other replicas go on without it")
            return
        self.fail_all("engine_down", reason)
        if not self.ended.done():
            self.ended.set_result(said)

    def _start_waiting(self) -> None:
        if self.state == READY:
            self._tracker.start_waiting()

    def _send(self, engine: int, message: ToEngine) -> None:
        self.engines[engine].give(message)

    def _place(self, request: EngineRequest) -> int | None:
        assert self.ready is not None
        ready = [engine for engine in self.engines if engine.state == READY]
        heard = [engine for engine in ready if engine.is_healthy]
        size = self.ready.page_size or _PAGE
        keys: list[bytes] = []
        is_shared = self.ready.shares_prefixes and request.sampling.prompt_logprobs is None
        is_shared &= request.pooling != MEAN
        if len(self.engines) > 1 and is_shared:
            keys = chain_keys(request.prompt, size, request.cache_salt)
        num_keys = self.ready.num_pages or self.ready.max_num_seqs * self.ready.max_context // size
        return self._tracker.router.place(
            request.request_id,
            keys,
            num_prompt=len(request.prompt),
            num_answer=request.sampling.max_tokens,
            usable=[engine.number for engine in heard or ready],
            num_slots=self.ready.max_num_seqs // len(self.engines),
            most_keys=num_keys // len(self.engines),
            like=request.like,
        )


def _together(engines: Sequence[EngineReady]) -> EngineReady:
    """Return the sums of the properties of equal engines. A request has a single engine."""
    first = engines[0]
    return msgspec.structs.replace(
        first,
        max_num_seqs=sum(engine.max_num_seqs for engine in engines),
        max_context=min(engine.max_context for engine in engines),
        max_positions=min(engine.max_positions for engine in engines),
        num_pages=sum(engine.num_pages for engine in engines),
        num_snapshots=sum(engine.num_snapshots for engine in engines),
        cache_bytes=sum(engine.cache_bytes for engine in engines),
    )


def _check_alike(name: str, ready: EngineReady, known: EngineReady) -> None:
    """Raise ConfigError if an engine differs from a running engine."""
    facts = {**ready.facts, "vocabulary": str(ready.vocab_size), "pages": str(ready.page_size)}
    others = {**known.facts, "vocabulary": str(known.vocab_size), "pages": str(known.page_size)}
    for key in sorted(facts.keys() | others.keys()):
        if facts.get(key) != others.get(key):
            said = f"{name}: {key} {facts.get(key)}; allowed: {others.get(key)}, as the others have"
            raise ConfigError(said)
