"""The front's side of its engines: asks them, hears them, and goes on where one of them dies.

Knows token ids and messages; texts and HTTP are for who asks, processes for `EngineProcess`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from tilewright.errors import ConfigError
from tilewright.runtime.memory.pages import chain_keys
from tilewright.runtime.messages import EngineReady, NewTokens, ResetPrefixCache, ToEngine
from tilewright.runtime.pooling import MEAN
from tilewright.runtime.request import EngineRequest
from tilewright.serve.engines.process import (
    DOWN,
    HUNG_SECONDS,
    LOADING,
    READY,
    EngineProcess,
)
from tilewright.serve.engines.request_tracker import Answer, Limits, RequestHandle, RequestTracker
from tilewright.serve.engines.routing import ReplicaRouter
from tilewright.serve.engines.run_folders import MeetingFolder
from tilewright.serve.web.errors import ApiError
from tilewright.serve.web.server_log import say
from tilewright.serve.web.settings import Replica

TOKENIZER = "tokenizer"
"""The folder in which the engine leaves its model's tokenizer for the front."""

_PAGE = 64
"""Tokens of a page by which requests are told apart, where an engine has no pages."""


class EngineClient:
    """The front's end of its engine processes: starts them, asks them, and starts them again.

    Requests are taken from when all have been up until the last one is gone for good. What runs on
    one that dies fails; what had not begun there goes to another.

    Args:
        command: what follows ``python`` and the folder's place in it, ``{}``.
        on_ready: told the number of an engine, its folder and what it says, each time one is up.
            What it raises ends that engine.
        replicas: one for each engine.

    Attributes:
        ready: what all engines together have: slots, pages and bytes are sums, lengths the least.
        ended: told why, behind an exit code, once there will be no engine any more.
    """

    def __init__(
        self,
        command: Sequence[str],
        on_ready: Callable[[int, Path, EngineReady], Awaitable[None]],
        *,
        replicas: Sequence[Replica] = (Replica(),),
        limits: Limits | None = None,
        hung_seconds: float = HUNG_SECONDS,
    ) -> None:
        self.ready: EngineReady | None = None
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._on_ready = on_ready
        router = ReplicaRouter(len(replicas))
        self._tracker = RequestTracker(self._place, self._send, router, limits or Limits())
        self._has_begun = False
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
                hung_seconds=hung_seconds,
            )
            for number, replica in enumerate(replicas)
        )

    @property
    def state(self) -> str:
        """``loading`` until all engines have been up, and while none is but one will be;
        ``ready`` while one is; ``down`` where there will be none.
        """
        states = [each.state for each in self.engines]
        if self.ended.done() or not {LOADING, READY}.intersection(states):
            return DOWN
        return READY if self._has_begun and READY in states else LOADING

    @property
    def is_healthy(self) -> bool:
        """Whether requests are taken, and an engine has been heard of lately."""
        return self.state == READY and any(each.is_healthy for each in self.engines)

    @property
    def missing(self) -> list[int]:
        """The engines that are not up, or have not been heard of lately, by their numbers."""
        return [each.number for each in self.engines if not each.is_healthy]

    @property
    def num_live(self) -> int:
        """The number of requests that wait or run in the engines."""
        return len(self._tracker)

    @property
    def num_waiting(self) -> int:
        """The number of requests that no engine has begun."""
        return self._tracker.num_waiting

    @property
    def num_restarts(self) -> int:
        """How often an engine was started again, all together."""
        return sum(each.num_restarts for each in self.engines)

    def start(self) -> None:
        """Start the engines; requests are taken once all are ready."""
        for engine in self.engines:
            engine.start()

    async def close(self) -> None:
        """End the engines' processes, kindly first, and remove their folder."""
        await asyncio.gather(*(each.close() for each in self.engines))
        self._folder.remove()

    def submit(self, requests: Sequence[EngineRequest], *, client: str = "") -> RequestHandle:
        """Submit requests that fit; see :class:`RequestHandle`. ``client``: name of the sender.

        Raises:
            ApiError: 503 while there is no engine, 429 where too much waits already.
        """
        if (state := self.state) != READY or self.ready is None:
            code = "loading" if state == LOADING else "engine_down"
            raise ApiError(503, code, f"the engine is {state}", headers={"retry-after": "5"})
        return self._tracker.submit(requests, client=client, max_context=self.ready.max_context)

    def under_way(self) -> list[dict[str, object]]:
        """List what an operator may know of each request: nothing of its text."""
        return self._tracker.under_way()

    def forget_prefixes(self) -> None:
        """Let no later prompt share what was computed until now."""
        self._tracker.router.forget()
        for engine in self.engines:
            engine.give(ResetPrefixCache())

    def fail_all(self, code: str, message: str) -> None:
        """Tell all who wait for answers that none will come, with a code and a message."""
        self._tracker.fail_all(code, message)

    async def begin(self, engine: int, folder: Path, ready: EngineReady) -> None:
        """See `Listener`; one at a time, for the first of them brings the tokenizer.

        Raises:
            ConfigError: where it serves another thing than the others, which no fingerprint could
                tell its clients.
        """
        async with self._beginning:
            others = [each for each in self.engines if each.number != engine]
            for known in (each.ready for each in others if each.ready and each.state != DOWN):
                _check_alike(self.engines[engine].name, ready, known)
            await self._on_ready(engine, folder, ready)

    def began(self, engine: int) -> None:
        """See `Listener`."""
        known = [each.ready for each in self.engines if each.ready is not None]
        self.ready = _together(known)
        self._has_begun |= all(each.state == READY for each in self.engines)
        self._start_waiting()

    def hear(self, engine: int, message: Answer) -> None:
        """See `Listener`."""
        if isinstance(message, NewTokens):  # most are
            self._tracker.on_message(message)
            return
        num_running = sum(each.beat.num_running for each in self.engines)
        self._tracker.on_message(message, num_running, engine=engine)

    def lost(self, engine: int, said: str) -> None:
        """See `Listener`."""
        self._tracker.fail_started(engine, said)
        self._start_waiting()

    def gone(self, engine: int, said: str) -> None:
        """See `Listener`."""
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

    def _place(self, asked: EngineRequest) -> int | None:
        assert self.ready is not None
        ready = [each for each in self.engines if each.state == READY]
        heard = [each for each in ready if each.is_healthy]
        size = self.ready.page_size or _PAGE
        keys: list[bytes] = []
        is_shared = self.ready.shares_prefixes and asked.sampling.prompt_logprobs is None
        is_shared &= asked.pooling != MEAN
        if len(self.engines) > 1 and is_shared:
            keys = chain_keys(asked.prompt, size, asked.cache_salt)
        held = self.ready.num_pages or self.ready.max_num_seqs * self.ready.max_context // size
        return self._tracker.router.place(
            asked.request_id,
            keys,
            num_prompt=len(asked.prompt),
            num_answer=asked.sampling.max_tokens,
            usable=[each.number for each in heard or ready],
            num_slots=self.ready.max_num_seqs // len(self.engines),
            most_keys=held // len(self.engines),
            like=asked.like,
        )


def _together(engines: Sequence[EngineReady]) -> EngineReady:
    """What engines that serve the same have together; a request has one of them alone."""
    first = engines[0]
    return msgspec.structs.replace(
        first,
        max_num_seqs=sum(each.max_num_seqs for each in engines),
        max_context=min(each.max_context for each in engines),
        max_positions=min(each.max_positions for each in engines),
        num_pages=sum(each.num_pages for each in engines),
        num_snapshots=sum(each.num_snapshots for each in engines),
        cache_bytes=sum(each.cache_bytes for each in engines),
    )


def _check_alike(name: str, ready: EngineReady, known: EngineReady) -> None:
    """Refuse an engine that serves another thing than one that is up. Raises ConfigError."""
    facts = {**ready.facts, "vocabulary": str(ready.vocab_size), "pages": str(ready.page_size)}
    others = {**known.facts, "vocabulary": str(known.vocab_size), "pages": str(known.page_size)}
    for key in sorted(facts.keys() | others.keys()):
        if facts.get(key) != others.get(key):
            said = f"{name}: {key} {facts.get(key)}; allowed: {others.get(key)}, as the others have"
            raise ConfigError(said)
