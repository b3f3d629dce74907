"""What comparisons in turn share: options, a model's files, commands of ours as children, and how
rows are kept and summed up.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tilewright.compiler.artifacts.paths import cache_dir
from tilewright.compiler.devices import describe_cpu
from tilewright.errors import ConfigError, TilewrightError
from tilewright.evaluate.report.display import decimal, span
from tilewright.options.arguments import integer, option
from tilewright.utils.child_process import PYTHON, Child
from tilewright.utils.environment import environment
from tilewright.utils.json_lines import append_lines, check_writable, read_records

TILEWRIGHT = (*PYTHON, "-m", "tilewright.cli.main")
"""Begins the command line of a ``tilewright`` verb in a process of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InTurn:
    """The options of every comparison in turn."""

    threads: int | None = option("CPU threads (default: all cores)", type=integer(1, 1024))
    rounds: int = option("in turn", default=3, type=integer(1, 1000))
    results: Path | None = option(
        "add every row to a file of JSON lines", metavar="FILE", type=Path
    )

    @property
    def num_threads(self) -> int:
        """The threads that were asked for, else one a core."""
        return self.threads or describe_cpu().num_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideLlama(InTurn):
    """The options of a comparison with llama.cpp's server."""

    llama_server: Path = option("llama.cpp's program", default=Path("llama-server"), type=Path)
    model: str | None = option("a GGUF file (default: SmolLM2-135M-Instruct)", metavar="PATH")


def model_and_copy(model: str | None, kind: str) -> tuple[Path, Path]:
    """The GGUF file of a model, and the same values in a GGUF type, for llama.cpp.

    Raises:
        ConfigError: for a model that is no GGUF file.
    """
    from bench.peers.gguf_copy import cached_gguf
    from tilewright.models import find_model, load_model

    path = find_model(model)
    if not isinstance(path, Path) or path.suffix != ".gguf":
        raise ConfigError(f"{model}: llama.cpp reads GGUF files; allowed: one of them")
    digest = load_model(path).checkpoint.content_hash()
    folder = cache_dir() / "peers"
    return path, cached_gguf(path, kind, content_hash=digest, folder=folder)


def answer_of(*words: str) -> dict[str, Any]:
    """What a ``tilewright`` verb with ``--json`` prints, run in a process of its own.

    Raises:
        TilewrightError: where it fails, with what it said last.
    """
    with Child([*TILEWRIGHT, *words, "--json"], what="tilewright") as child:
        ended = child.wait()
        assert ended is not None
        if ended.code:
            raise TilewrightError(f"tilewright {words[0]}: {(ended.last or ended.how)[-300:]}")
        found: dict[str, Any] = json.loads(child.output())
    return found


def with_checkout() -> dict[str, str]:
    """The environment in which a child finds this room: the checkout stands behind where the
    package is found, for its own folder of that name is only the package's face.
    """
    checkout = str(Path(__file__).resolve().parents[1])
    paths = filter(None, (os.environ.get("PYTHONPATH"), checkout))
    return {"PYTHONPATH": os.pathsep.join(paths)}


def keeper(path: Path | None) -> Callable[[Mapping[str, Any]], None]:
    """What appends a row to a file of JSON lines, with when, where and on which code the run is;
    without a file it keeps nothing.

    Raises:
        ConfigError: for a file that cannot be written.
    """
    if path is None:
        return lambda row: None
    check_writable(path)
    facts, host = environment(), describe_cpu().full_name
    taken = {"commit": facts.commit, "date": facts.timestamp, "host": host}
    return lambda row: append_lines(path, json.dumps({**row, **taken}).encode() + b"\n")


def kept_rows(path: Path, verb: str) -> list[dict[str, Any]]:
    """The rows that a `keeper` has appended to a file; ``verb``: the command that writes it.

    Raises:
        ConfigError: where there are none, and on a line that is no row.
    """
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    found = read_records(path, decode, expected="not a row") if path.exists() else []
    if not found:
        raise ConfigError(f"{path} is missing; allowed: rows of python -m bench {verb} --results")
    return [each.record for each in found]


def median_and_range(values: Sequence[float], digits: int = 1) -> str:
    """The median with the lowest and the highest, as ``5.0 (3.0 to 6.0)``; one value has no range;
    blank without values.
    """
    if not values:
        return ""
    middle = decimal(statistics.median(values), digits, grouped=True)
    if len(values) == 1:
        return middle
    return f"{middle} ({span(min(values), max(values), digits, joint=' to ', grouped=True)})"
