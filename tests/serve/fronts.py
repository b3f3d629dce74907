"""A front in this process, in a thread of its own, with an engine that has no model."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import uvloop

from tests.serve.asked import Asked
from tilewright.models.tokenizer.byte_tokenizer import byte_tokenizer
from tilewright.models.tokenizer.tokenizer import Tokenizer
from tilewright.serve.api_server import ApiServer, LoadCoder
from tilewright.serve.engines.client import TOKENIZER
from tilewright.serve.prompt.texts import TextCoder
from tilewright.serve.web.server import listen, serving
from tilewright.serve.web.settings import ServerConfig

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"


@dataclass(frozen=True, slots=True)
class Running(Asked):
    """A front that listens: what it knows may be read from here, for it is only read."""

    front: ApiServer
    loop: asyncio.AbstractEventLoop

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        """A JSON body, and what is answered."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer, said = self.ask(
            "POST", path, data, content_type="application/json", **headers
        )
        return status, json.loads(answer), said

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


def wait_until(is_so: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def load_bytes(folder: Path) -> TextCoder:
    """Of the fake engine: a token a byte, and a template that writes the contents."""
    plain = byte_tokenizer(256, "fake")
    return Tokenizer(replace(plain._vocabulary, chat_template=TEMPLATE))


@cache
def fake_command() -> tuple[str, ...]:
    """Return the command of the fake engine. Its tokenizer is written once a process."""
    folder = Path(tempfile.mkdtemp(prefix="fake-"))
    atexit.register(shutil.rmtree, folder)
    byte_tokenizer(256, "fake").save(folder / TOKENIZER)
    return str(Path(__file__).with_name("fake_engine.py")), "{}", str(folder / TOKENIZER)


@contextlib.contextmanager
def running_front(
    settings: ServerConfig | None = None,
    *,
    waits: bool = True,
    send_buffer: int = 0,
    load: LoadCoder = load_bytes,
    command: Sequence[str] = (),
) -> Iterator[Running]:
    """A front, its engine, and their end. ``send_buffer``: bytes the kernel takes for a client."""
    settings = settings or ServerConfig()
    found: list[Running] = []
    ends = threading.Event()
    faults: list[BaseException] = []

    async def live(bound: socket.socket) -> None:
        async with serving(settings, command or fake_command(), load, bound) as front:
            loop = asyncio.get_running_loop()
            found.append(Running(bound.getsockname()[1], front, loop))
            while not ends.is_set():
                await asyncio.sleep(0.01)

    def run() -> None:
        try:
            with (
                listen("127.0.0.1", 0) as bound,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,  # as in service
            ):
                if send_buffer:
                    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
                runner.run(live(bound))
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: found or faults)
        if waits:
            wait_until(lambda: faults or found[0].front.health() == "ok")
        assert not faults, faults
        yield found[0]
    finally:
        ends.set()
        thread.join(20)
        assert not faults and not thread.is_alive(), faults


def chat(text: str, **changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **changes}


def raw(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return HEAD + b"content-length: %d\r\n\r\n" % len(data) + data


def read_all(client: socket.socket) -> bytes:
    data = b""
    try:
        while piece := client.recv(1 << 16):
            data += piece
    except ConnectionError:
        pass
    return data


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_idle(running: Running) -> bool:
    return not running.front.client.num_live and not running.front.client.num_waiting
