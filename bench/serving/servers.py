"""Servers that are loaded in turn: ours and llama.cpp's, each a child process on a free port."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.in_turn import TILEWRIGHT
from tilewright.errors import ConfigError, TilewrightError
from tilewright.serve.web.health import is_healthy
from tilewright.utils.child_process import Child

_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Contestant:
    """A server's name in the table, and its command line without a port."""

    name: str
    command: tuple[str, ...]


def ours(model: str, precision: str, *, users: int, context: int, threads: int) -> Contestant:
    """`tilewright serve` with a seat for each user."""
    options = ("--precision", precision, "--threads", str(threads))
    seats = ("--max-seats", str(users), "--max-context", str(context))
    return Contestant("tilewright", (*TILEWRIGHT, "serve", model, *options, *seats))


def check_program(binary: Path) -> None:
    """Refuse a path of `llama-server` where there is no program (ConfigError)."""
    if shutil.which(binary) is None:
        raise ConfigError(
            f"{binary}: there is no llama-server; docs/benchmarks.md describes its build"
        )


def llama_cpp(binary: Path, model: Path, *, users: int, context: int, threads: int) -> Contestant:
    """llama.cpp's `llama-server` with a slot for each user; contexts are shared out among them.

    Raises:
        ConfigError: where there is no such program.
    """
    check_program(binary)
    sizes = ("-np", str(users), "-c", str(users * context), "-t", str(threads))
    return Contestant("llama.cpp", (str(binary), "-m", str(model), *sizes, "--no-webui"))


@contextmanager
def running(contestant: Contestant, log: Path) -> Iterator[str]:
    """The URL of a server that answers ``/health`` with 200; it is ended behind the block.

    Raises:
        TilewrightError: where it does not come up, with what it said last.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    command = [*contestant.command, "--host", "127.0.0.1", "--port", str(port)]
    with Child(command, what=contestant.name, log=log) as child:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not is_healthy("127.0.0.1", port):
            if child.poll() is not None or time.monotonic() > deadline:
                said = "\n".join(child.stop().said)
                raise TilewrightError(f"{contestant.name} did not start: {said}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"


def in_turn(first: Sequence[Contestant], num_rounds: int) -> Iterator[tuple[int, Contestant]]:
    """A B A B, so that what else the machine does meets all alike."""
    for number in range(num_rounds):
        for contestant in first:
            yield number, contestant
