"""Start time: seconds from exec to the first token of ``tilewright run``, CPU time, peak memory.

``python -m bench.targets.start [MODEL] [--runs 5] [--cold] [--options WORDS]``. A warm start
follows a run that fills the cache. A cold start has an empty cache each time. Needs an idle
machine. Example: ``--options "--target cuda --precision bf16"``.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tilewright.options.arguments import integer, option, parse
from tilewright.utils.files import CACHE_VARIABLE

_PROMPT = "Name the capital of France, please, and one river that flows through it."
_LINE = "first token after {:.2f} s, CPU time {:.2f} s, peak {:.0f} MB"
_BYTECODE = "PYTHONDONTWRITEBYTECODE"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    model: str | None = option(
        "a model or a compiled folder (default: the default model)", "model", nargs="?"
    )
    prompt: str = option("the prompt", default=_PROMPT)
    runs: int = option("number of measured runs (default: 5)", default=5, type=integer(1, 100))
    options: str = option("further options of tilewright run", default="", metavar="WORDS")
    cold: bool = option("empty the cache before each run", default=False)


def main(argv: list[str]) -> int:
    """Print a line a run, and the minimum."""
    words = "Measure the time from exec to the first token of tilewright run."
    arguments = parse(_Arguments, argv, prog="python -m bench.targets.start", description=words)
    environment = {name: text for name, text in os.environ.items() if name != _BYTECODE}
    command = [sys.executable, "-m", "tilewright.cli.main", "run", "--prompt", arguments.prompt]
    command += [*shlex.split(arguments.options), "--max-tokens", "1"]
    command += [] if arguments.model is None else [arguments.model]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        environment[CACHE_VARIABLE] = folder
        if not arguments.cold:
            _start(command, environment)
            time.sleep(3.5)  # digests of younger files are not remembered
            _start(command, environment)
        for number in range(arguments.runs):
            if arguments.cold:
                environment[CACHE_VARIABLE] = str(Path(folder) / str(number))
            found.append(_start(command, environment))
            print(_LINE.format(*found[-1]), flush=True)
    print(f"best of {len(found)}: {_LINE.format(*map(min, zip(*found, strict=True)))}")
    return 0


def _start(command: list[str], environment: dict[str, str]) -> tuple[float, float, float]:
    """Return seconds to the first byte of the answer, CPU seconds, and peak memory (MB)."""
    began = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        first_s = time.perf_counter() - began
        said = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(said.decode(errors="replace").strip())
    return first_s, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
