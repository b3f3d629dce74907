"""Parts of all comparisons: options, child processes, servers, and rows of JSON lines."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.compiler.artifacts.paths import cache_dir
from tilewright.compiler.devices import describe_cpu
from tilewright.compiler.precision import load_precision
from tilewright.errors import ConfigError, TilewrightError, allowed
from tilewright.options.arguments import integer, option
from tilewright.serve.web.health import is_healthy
from tilewright.utils.child_process import PYTHON, Child
from tilewright.utils.environment import environment
from tilewright.utils.json_lines import append_lines, check_writable

TILEWRIGHT = (*PYTHON, "-m", "tilewright.cli.main")
"""Begins the command line of a ``tilewright`` command in a child process."""

KINDS = ("Q4_0", "Q4_1", "Q8_0", "F16", "BF16")
_START_SECONDS = 540.0


@dataclass(frozen=True, slots=True)
class Pair:
    """A precision configuration, and the GGUF type for a baseline."""

    precision: str
    gguf_type: str

    def __str__(self) -> str:
        return f"{self.precision} | {self.gguf_type}"


def read_pair(text: str) -> Pair:
    """Return the pair ``PRECISION=TYPE``.

    Raises:
        ConfigError: for another text.
    """
    precision, separator, gguf_type = text.rpartition("=")
    if not separator or not precision or gguf_type.upper() not in KINDS:
        raise ConfigError(
            f"pair {text!r}; {allowed(f'PRECISION={gguf_type}' for gguf_type in KINDS)}"
        )
    load_precision(precision)
    return Pair(precision, gguf_type.upper())


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Options of every comparison."""

    threads: int | None = option("CPU threads (default: all cores)", type=integer(1, 1024))
    rounds: int = option("alternating rounds", default=3, type=integer(1, 1000))
    results: Path | None = option("append rows, as JSON lines", metavar="FILE", type=Path)
    llama_server: Path = option("program of llama.cpp", default=Path("llama-server"), type=Path)
    model: str | None = option("a GGUF file (default: SmolLM2-135M-Instruct)", metavar="PATH")

    @property
    def num_threads(self) -> int:
        """The number of threads, by default the number of cores."""
        return self.threads or describe_cpu().num_cores


def model_and_copy(model: str | None, gguf_type: str) -> tuple[Path, Path]:
    """Return the GGUF file of a model, and a copy with another GGUF type.

    Raises:
        ConfigError: for a model without a GGUF file.
    """
    from bench.baselines.gguf_copy import cached_gguf
    from tilewright.models import find_model, load_model

    path = find_model(model)
    if not isinstance(path, Path) or path.suffix != ".gguf":
        raise ConfigError(f"{model}: llama.cpp cannot read it; allowed: a GGUF file")
    content_hash = load_model(path).checkpoint.content_hash()
    return path, cached_gguf(
        path, gguf_type, content_hash=content_hash, folder=cache_dir() / "baselines"
    )


def run_json(*words: str) -> dict[str, Any]:
    """Return the output of a ``tilewright`` command with ``--json``, run in a child process.

    Raises:
        TilewrightError: if the command fails, with its last line.
    """
    with Child([*TILEWRIGHT, *words, "--json"], what="tilewright") as child:
        ended = child.wait()
        assert ended is not None
        if ended.code:
            raise TilewrightError(f"tilewright {words[0]}: {(ended.last or ended.how)[-300:]}")
        found: dict[str, Any] = json.loads(child.output())
    return found


def with_checkout() -> dict[str, str]:
    """Return the environment for a child that imports ``bench``."""
    checkout = str(Path(__file__).resolve().parents[1])
    paths = filter(None, (os.environ.get("PYTHONPATH"), checkout))
    return {"PYTHONPATH": os.pathsep.join(paths)}


def keeper(path: Path | None) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that appends a row with date, commit and host to a file.

    Raises:
        ConfigError: if the file cannot be written.
    """
    if path is None:
        return lambda row: None
    check_writable(path)
    facts, host = environment(), describe_cpu().full_name
    taken = {"commit": facts.commit, "date": facts.timestamp, "host": host}
    return lambda row: append_lines(path, json.dumps({**row, **taken}).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class Server:
    """A server to load: its name in tables, and its command without a port."""

    name: str
    command: tuple[str, ...]


def own_server(
    model: str, precision: str, *, users: int, context: int, threads: int | None
) -> Server:
    """Return ``tilewright serve`` with a slot for each user."""
    sizes = ("--max-num-seqs", str(users), "--max-model-len", str(context))
    words = (*TILEWRIGHT, "serve", model, "--precision", precision, *sizes)
    return Server("tilewright", (*words, *(("--num-threads", str(threads)) if threads else ())))


def check_program(binary: Path) -> None:
    """Raise ConfigError if there is no ``llama-server``."""
    if shutil.which(binary) is None:
        raise ConfigError(
            f"{binary}: there is no llama-server; docs/benchmarks.md describes its build"
        )


def llama_cpp(binary: Path, model: Path, *, users: int, context: int, threads: int) -> Server:
    """Return ``llama-server`` with a slot for each user.

    Raises:
        ConfigError: if there is no such program.
    """
    check_program(binary)
    sizes = ("-np", str(users), "-c", str(users * context), "-t", str(threads))
    return Server("llama.cpp", (str(binary), "-m", str(model), *sizes, "--no-webui"))


@contextmanager
def running(server: Server, log: Path) -> Iterator[str]:
    """Run a server and yield its URL. ``/health`` returns 200 first.

    Raises:
        TilewrightError: if the server does not start, with its last lines.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    command = [*server.command, "--host", "127.0.0.1", "--port", str(port)]
    with Child(command, what=server.name, environment=with_checkout(), log=log) as child:
        deadline = time.monotonic() + _START_SECONDS
        while not is_healthy("127.0.0.1", port):
            if child.poll() is not None or time.monotonic() > deadline:
                said = "\n".join(child.stop().said)
                raise TilewrightError(f"{server.name} did not start: {said}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
