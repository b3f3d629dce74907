"""``tilewright bench-nodes``: a model over CPU nodes, free and over links of a known rate.

Processes of one machine share its memory bus, and are not machines: see docs/parallel.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.in_turn import TILEWRIGHT
from bench.nodes.files import SHAPES, write_files
from bench.nodes.links import address, inside, machines
from tilewright.compiler.child import Child
from tilewright.compiler.commands.arguments import integer, option, parse
from tilewright.compiler.errors import ConfigError
from tilewright.compiler.json_lines import append_lines

_PORT, _SECONDS = 9999, 900.0
_FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    shape: str = option("of random weights in q40", default="1.17b", choices=tuple(SHAPES))
    model: str | None = option("a model instead of a shape", metavar="PATH")
    nodes: tuple[int, ...] = option("how many", default=(1, 2, 4), type=integer(1, 16))
    links: tuple[str, ...] = option(
        "free, or gigabits a second (root)", default=(_FREE,), metavar="RATE"
    )
    threads: int = option("of a node", default=2, type=integer(1, 64))
    wire: str = option("of partial sums", default="q80", choices=("f32", "bf16", "q80"))
    prompt_tokens: int = option(
        "each a letter, of shapes' files", default=64, type=integer(1, 4000)
    )
    steps: int = option("tokens of prompt and answer", default=160, type=integer(1, 4000))
    repeats: int = option("of each", default=1, type=integer(1, 100))
    json: str | None = option("a file that rows are added to", "--json", metavar="FILE")


@dataclass(frozen=True, slots=True)
class Row:
    """One run: tokens a second, and of each predicted token what rank 0 sent and waited."""

    model: str
    nodes: int
    threads: int
    link: str
    wire: str
    prompt_rate: float
    decode_rate: float
    sent_kb: float
    exchange_ms: float


def main(argv: list[str]) -> int:
    """Run ``tilewright bench-nodes`` with the arguments behind it; returns the exit code."""
    words = "Measure a model over CPU nodes."
    given = parse(_Arguments, argv, prog="tilewright bench-nodes", description=words)
    with tempfile.TemporaryDirectory(prefix="tilewright-nodes-") as folder:
        model = Path(given.model) if given.model else write_files(given.shape, Path(folder))
        print(f"{'link':>8} {'nodes':>5} {'prompt t/s':>10} {'decode t/s':>10} kB/tok ms/tok")
        for link in given.links:
            for count in given.nodes:
                for _ in range(given.repeats):
                    _show(_run(given, model, count, link), given.json)
    return 0


def _show(row: Row, path: str | None) -> None:
    rates = f"{row.prompt_rate:>10.1f} {row.decode_rate:>10.1f}"
    print(f"{row.link:>8} {row.nodes:>5} {rates} {row.sent_kb:>6.1f} {row.exchange_ms:>6.2f}")
    if path is not None:
        append_lines(path, json.dumps(asdict(row)).encode() + b"\n")


def _run(given: _Arguments, model: Path, count: int, link: str) -> Row:
    command = [*TILEWRIGHT, "nodes", "--model", str(model)]
    command += ["--nthreads", str(given.threads), "--steps", str(given.steps)]
    command += ["--buffer-float-type", given.wire, "--prompt", "a" * given.prompt_tokens]
    token = {"TILEWRIGHT_TOKEN": secrets.token_hex(16)}
    if link == _FREE:
        said = _output([*command, "--nodes", str(count)], token)
    else:
        with machines(count, _rate(link)), _workers(count, token, model):
            workers = [f"{address(node)}:{_PORT}" for node in range(1, count)]
            command += ["--workers", *workers] if workers else []
            said = _output([*inside(0), *command], token)
    return _row(said, model.stem, count, given, link)


@contextlib.contextmanager
def _workers(count: int, token: dict[str, str], model: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for node in range(1, count):
            command = [*inside(node), *TILEWRIGHT, "nodes", "worker", "--model", str(model)]
            command += ["--host", address(node), "--port", str(_PORT)]
            stack.enter_context(Child(command, environment=token))
        time.sleep(0.5)
        yield


def _output(command: list[str], token: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        check=False,
        timeout=_SECONDS,
        env={**os.environ, **token},
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigError(f"nodes ended with {done.returncode}: {''.join(last)}")
    return done.stdout.decode(errors="replace")


def _rate(link: str) -> float:
    try:
        found = float(link)
    except ValueError:
        found = 0.0
    if not 0.001 <= found <= 100:
        raise ConfigError(f"--links {link}; allowed: free, or gigabits a second, 0.001 to 100")
    return found


def _row(said: str, model: str, nodes: int, given: _Arguments, link: str) -> Row:
    """The figures in what ``tilewright nodes`` prints behind its text."""
    lines = [line.split() for line in said.splitlines()]
    rates = [float(line[1]) for line in lines if line[:1] == ["tokens/s:"]]
    sent = [float(line[1]) for line in lines if line[:1] == ["sent:"] and line[2:] == ["kB/tok"]]
    waited = [float(line[1]) for line in lines if line[:1] == ["time:"] and line[2:] == ["ms/tok"]]
    figures = rates[-2], rates[-1], sent[-1] if sent else 0.0, waited[-1] if waited else 0.0
    return Row(model, nodes, given.threads, link, given.wire, *figures)
