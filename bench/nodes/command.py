"""``python -m bench bench-nodes``: a model over CPU nodes, free and over links of a known rate.

Processes of one machine share its memory bus, and are not machines: see docs/multi_gpu.md.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.in_turn import TILEWRIGHT, keeper
from bench.nodes.files import SHAPES, write_files
from bench.nodes.links import address, inside, machines, read_link
from bench.nodes.tables import FREE, Run
from tilewright.errors import ConfigError
from tilewright.options.arguments import integer, option, parse
from tilewright.utils.child_process import Child

_PORT, _SECONDS = 9999, 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    shape: str = option("of random weights in q40", default="1.17b", choices=tuple(SHAPES))
    model: str | None = option("a model instead of a shape", metavar="PATH")
    nodes: tuple[int, ...] = option("how many", default=(1, 2, 4), type=integer(1, 16))
    links: tuple[str, ...] = option(
        "free, or gigabits a second and a delay, as 1 or 1+100us (root)",
        default=(FREE,),
        metavar="LINK",
    )
    threads: int = option("of a node", default=2, type=integer(1, 64))
    wires: tuple[str, ...] = option(
        "of partial sums, in turn", default=("q80",), choices=("f32", "bf16", "q80")
    )
    prompt_tokens: int = option(
        "each a letter, of shapes' files", default=64, type=integer(1, 4000)
    )
    steps: int = option("tokens of prompt and answer", default=160, type=integer(1, 4000))
    repeats: int = option("rounds, each of all others once", default=1, type=integer(1, 100))
    results: Path | None = option(
        "add every run to a file of JSON lines", metavar="FILE", type=Path
    )


def main(argv: list[str]) -> int:
    """Run ``python -m bench bench-nodes`` with the arguments behind it; returns the exit code."""
    words = "Measure a model over CPU nodes."
    given = parse(_Arguments, argv, prog="python -m bench bench-nodes", description=words)
    keep = keeper(given.results)
    for link in given.links:
        if link != FREE:
            read_link(link)  # now: runs over the links before it take minutes
    with tempfile.TemporaryDirectory(prefix="tilewright-nodes-") as folder:
        model = Path(given.model) if given.model else write_files(given.shape, Path(folder))
        print(f"{'link':>9} {'nodes':>5} wire prompt t/s decode t/s kB/tok ms/tok others")
        for link in given.links:
            for _ in range(given.repeats):
                for count in given.nodes:
                    for wire in given.wires if count > 1 else ("",):
                        row = _run(given, model, (count, wire), link)
                        _show(row)
                        keep(asdict(row))
    return 0


def _show(row: Run) -> None:
    begin = f"{row.link:>9} {row.nodes:>5} {row.wire:>4}"
    rates = f"{row.prompt_rate:>10.1f} {row.decode_rate:>10.1f}"
    print(f"{begin} {rates} {row.sent_kb:>6.1f} {row.exchange_ms:>6.2f} {row.others:>6.1%}")


def _run(given: _Arguments, model: Path, kind: tuple[int, str], link: str) -> Run:
    count, wire = kind
    options = ["--nthreads", str(given.threads), "--steps", str(given.steps)]
    options += ["--buffer-float-type", wire] if wire else []
    options += ["--nodes", str(count)] if link == FREE else []
    command = [*TILEWRIGHT, "run", "--model", str(model), *options]
    command += ["--prompt", "a" * given.prompt_tokens]
    token = {"TILEWRIGHT_TOKEN": secrets.token_hex(16)}
    began, busy, own = time.monotonic(), _busy_seconds(), _own_seconds()
    if link == FREE:
        said = _output(command, token)
    else:
        with machines(count, read_link(link)), _workers(count, token, model):
            workers = [f"{address(node)}:{_PORT}" for node in range(1, count)]
            command += ["--workers", *workers] if workers else []
            said = _output([*inside(0), *command], token)
    shown = shlex.join(["tilewright", "run", "--model", model.name, *options])
    kinds = (model.stem, count, given.threads, link, wire)
    others = _busy_seconds() - busy - (_own_seconds() - own)
    others /= (time.monotonic() - began) * (os.cpu_count() or 1)
    others = round(min(max(others, 0.0), 1.0), 3)  # clocks count in hundredths of a second
    return Run(*kinds, *_figures(said), given.prompt_tokens, shown, others)


@contextlib.contextmanager
def _workers(count: int, token: dict[str, str], model: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for node in range(1, count):
            command = [*inside(node), *TILEWRIGHT, "run", "--worker", "--model", str(model)]
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


def _busy_seconds() -> float:
    """What all cores of the machine have computed so far, in user and in system time."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=8)[1:8]
    user, nice, system, _, _, interrupts, soft = (int(field) for field in fields)
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """What processes of runs that have ended computed, with all that they started."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def _figures(said: str) -> tuple[float, float, float, float]:
    """Tokens a second of prompt and answer, kB and ms in exchanges a token, as ``nodes`` prints."""
    lines = [line.split() for line in said.splitlines()]
    rates = [float(line[1]) for line in lines if line[:1] == ["tokens/s:"]]
    sent = [float(line[1]) for line in lines if line[:1] == ["sent:"] and line[2:] == ["kB/tok"]]
    waited = [float(line[1]) for line in lines if line[:1] == ["time:"] and line[2:] == ["ms/tok"]]
    return rates[-2], rates[-1], sent[-1] if sent else 0.0, waited[-1] if waited else 0.0
