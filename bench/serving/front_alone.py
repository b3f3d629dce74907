"""``python -m bench bench-front``: what the front takes alone, on an engine that only paces it.

Prints what came a second by the clock, and microseconds of CPU time of each process, which other
work on the machine does not stretch.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from bench.serving.servers import Contestant, running
from tilewright.evaluate.load.client import COMPLETIONS, Client, connected
from tilewright.evaluate.report.table import Table
from tilewright.options.arguments import Parser
from tilewright.utils.child_process import PYTHON

_PACED = Path(__file__).with_name("paced.py")
_EVENT, _LAST, _FEW_TOKENS = b"data: {", b"data: [DONE]", 2
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_PROMPT = list(range(97, 113))


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds of front, engine and client until now, and the clock."""

    front: float
    engine: float
    client: float
    at: float


@dataclass(slots=True)
class _Answers(asyncio.Protocol):
    """Asks over one connection that it keeps, ``count`` times; counts events and does not read
    them, so that what is measured is not this client.
    """

    request: bytes
    count: int
    num_events: int = 0
    done: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    _data: bytes = b""
    _transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if b"200 OK" in self._data[:20] and not self._is_whole():
            return
        self.count -= 1
        if self.count and self._transport is not None and b"200 OK" in self._data[:20]:
            self._data = b""
            self._transport.write(self.request)
        elif self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        if self.count:
            said = self._data[-200:].decode("utf-8", "replace")
            self.done.set_exception(ConnectionError(f"an answer was not whole: {said!r}"))
        else:
            self.done.set_result(None)

    def _is_whole(self) -> bool:
        head, found, body = self._data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head) if found else None
        if length is not None:
            return len(body) >= int(length.group(1))
        if not self._data.endswith(b"\r\n0\r\n\r\n"):
            return False
        assert _LAST in self._data[-40:], self._data[-200:]
        self.num_events += self._data.count(_EVENT)
        return True


async def chunks(url: str, seats: int, num_tokens: int) -> int:
    """Stream an answer to each of so many users at once; returns how many chunks had text."""
    body: dict[str, object] = {"stream": True, "max_tokens": num_tokens, "ignore_eos": True}
    heard = await _ask(url, body, seats, 1)
    return sum(each.num_events - 1 for each in heard)  # the last says why it ended


async def requests(url: str, users: int, each: int) -> int:
    """Ask for short answers, whole, ``each`` of every user's behind the other; how many."""
    body: dict[str, object] = {"max_tokens": _FEW_TOKENS, "ignore_eos": True}
    await _ask(url, body, users, each)
    return users * each


async def _ask(url: str, body: dict[str, object], users: int, each: int) -> list[_Answers]:
    host, _, port = url.removeprefix("http://").partition(":")
    data = json.dumps({"prompt": _PROMPT, **body}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
    make: Callable[[], _Answers] = lambda: _Answers(request, each)  # noqa: E731
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(make, host, int(port)) for _ in range(users)]
    answers = [answer for _, answer in made]
    await asyncio.gather(*(answer.done for answer in answers))
    return answers


async def _spent(client: Client) -> Spent:
    found = await client.metrics()
    processes = found["process_cpu_seconds_total"], found["engine_process_cpu_seconds_total"]
    return Spent(*processes, time.process_time(), time.perf_counter())


def _row(what: str, count: int, before: Spent, after: Spent) -> tuple[str, ...]:
    seconds = after.at - before.at
    each = [
        f"{1e6 * (getattr(after, who) - getattr(before, who)) / count:.1f}"
        for who in ("front", "engine", "client")
    ]
    return (what, f"{count:,}", f"{count / seconds:,.0f}", *each)


async def measure(url: str, *, seats: int, num_tokens: int, num_requests: int) -> Table:
    """Both figures of a server that is up, behind a short warm-up."""
    async with connected(url, "any") as client:
        await chunks(url, seats, 16)
        await requests(url, seats, 4)
        first = await _spent(client)
        num_chunks = await chunks(url, seats, num_tokens)
        second = await _spent(client)
        count = await requests(url, seats, max(1, num_requests // seats))
        third = await _spent(client)
    per = seats * num_tokens / num_chunks
    rows = [
        _row(f"chunks, {per:.2f} tokens each", num_chunks, first, second),
        _row("short requests", count, second, third),
    ]
    head = ("what", "count", "a second", "front, CPU us", "engine, CPU us", "client, CPU us")
    return Table.of(head, rows)


def main(argv: list[str]) -> int:
    """Run ``python -m bench bench-front``; returns the exit code."""
    parser = Parser(prog="python -m bench bench-front", description=__doc__)
    parser.add_argument("--seats", type=int, default=64, help="users of an engine at a time")
    parser.add_argument("--replicas", type=int, default=1, help="engines, each with its seats")
    parser.add_argument("--steps", type=int, default=300, help="of an engine, a second at most")
    parser.add_argument("--tokens", type=int, default=2000, help="of each stream")
    parser.add_argument("--requests", type=int, default=10_000, help="short ones, in all")
    given = parser.parse_args(argv)
    sizes = [str(each) for each in (given.seats, given.steps, given.replicas)]
    command = (*PYTHON, str(_PACED), "front", *sizes)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "front.log"
        with running(Contestant("the front", command), log) as url:
            table = asyncio.run(
                measure(
                    url,
                    seats=given.seats * given.replicas,
                    num_tokens=given.tokens,
                    num_requests=given.requests,
                )
            )
    print(table.markdown(), end="")
    return 0
