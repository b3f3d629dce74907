"""What ``tilewright sweep PLAN`` is asked to do, checked before anything heavy is imported."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.compiler.bench.cases import CASES
from tilewright.compiler.bench.json_lines import check_writable
from tilewright.compiler.bench.prompts import accuracy_text
from tilewright.compiler.commands.arguments import Parser, integer, real
from tilewright.compiler.devices import BOARDS
from tilewright.compiler.errors import ConfigError, allowed
from tilewright.compiler.plain_yaml import parse_yaml, read_text
from tilewright.compiler.precision import load_precision
from tilewright.compiler.precision.fragment import as_map, check_keys
from tilewright.compiler.sweep.levels import Level

PLANS = {
    "table": "performance and accuracy of every model, and the base",
    "pareto": "the twelve published settings: speed against top-1",
    "sensitivity": "one group, and one group of one layer, lowered at a time",
    "search": "the fastest configuration within a bound, from the sensitivities",
    "grid": "models x targets x devices x precisions x cases x rounds",
}
DEFAULT_FOLDER = Path("results/sweeps")
DEFAULT_LEVELS = ("q80", "bfp8", "q40", "bfp4")
LISTS = ("models", "targets", "devices", "precisions", "cases", "levels")
_TIMEOUT, _BOARD_TIMEOUT = 900.0, 3600.0
_MOST = {"rounds": 10_000, "threads": 1024}
_SIZES = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """A checked command line.

    ``asked``: what the plan depends on and was not left at its default, as text; a resumed sweep
    must have been asked for the same. None where a default is to be filled in by the plan.
    """

    plan: str
    asked: dict[str, str]
    models: tuple[str, ...]
    targets: tuple[str, ...]
    devices: tuple[str, ...]
    precisions: tuple[str, ...]
    cases: tuple[str, ...] | None
    rounds: int
    compute: str
    threads: int | None
    text: str | None
    base: str
    levels: tuple[Level, ...]
    min_top1: float | None
    max_kl: float | None
    max_bytes: int | None
    sensitivities: Path | None
    held_out: str
    output: Path | None
    results: Path
    resume: bool
    dry_run: bool
    yes: bool
    jobs: int
    timeout_s: float
    memory: int | None


def parser(plan: str) -> argparse.ArgumentParser:
    """The options of a plan."""
    found = Parser(prog=f"tilewright sweep {plan}", description=PLANS[plan])
    what = found.add_argument_group("what is measured")
    what.add_argument("--models", nargs="+", metavar="PATH", help="as tilewright run (smollm2)")
    what.add_argument("--targets", nargs="+", metavar="NAME", help="default: cpu")
    what.add_argument("--devices", nargs="+", metavar="NAME", help="default: each target's own")
    if plan in ("grid", "pareto", "table"):
        also = "" if plan == "grid" else "; beside the plan's own"
        what.add_argument(
            "--precisions", nargs="+", metavar="NAME", help=f"as tilewright run{also}"
        )
    what.add_argument("--cases", nargs="+", metavar="NAME", help="see tilewright run --list")
    what.add_argument("--rounds", type=integer(1, _MOST["rounds"]), help="of every speed case (3)")
    what.add_argument("--compute", choices=("fast", "exact"), help="default: fast")
    what.add_argument("--threads", type=integer(1, _MOST["threads"]), help="of a speed cell")
    what.add_argument("--accuracy-text", metavar="TEXT", help="as tilewright run")
    what.add_argument("--base", metavar="NAME", help="what others are compared with (bf16)")
    if plan in ("sensitivity", "search"):
        what.add_argument(
            "--levels",
            nargs="+",
            metavar="FORMAT[:FIDELITY]",
            help="what parts are lowered to (sensitivity: bfp8; search: "
            f"{' '.join(DEFAULT_LEVELS)})",
        )
    if plan == "search":
        _add_search_options(found)
    _add_running_options(found, plan)
    return found


def _add_search_options(found: argparse.ArgumentParser) -> None:
    search = found.add_argument_group("the search")
    search.add_argument("--min-top1", type=real(0, 100), metavar="PERCENT", help="95")
    search.add_argument("--max-kl", type=real(0, 100), metavar="NATS", help="from fp32: 0.01")
    search.add_argument("--max-bytes", metavar="SIZE", help="of the weights: 1.2GB, 300MB")
    search.add_argument("--from", dest="sensitivities", metavar="FILE", help="a sensitivity sweep")
    search.add_argument("--held-out", metavar="TEXT", help="confirm on this (held-out)")
    search.add_argument("-o", "--output", metavar="YAML", help="where the winner is written")


def _add_running_options(found: argparse.ArgumentParser, plan: str) -> None:
    running = found.add_argument_group("running")
    running.add_argument(
        "--results", metavar="FILE", default=None, help=f"default: {DEFAULT_FOLDER / plan}.jsonl"
    )
    running.add_argument("--resume", action="store_true", help="go on with what is there")
    running.add_argument("--dry-run", action="store_true", help="print the cells' bytes and time")
    running.add_argument("--yes", action="store_true", help="also a very large plan")
    running.add_argument(
        "--jobs", type=integer(1, 256), default=1, help="accuracy cells side by side (1)"
    )
    running.add_argument(
        "--timeout",
        type=real(0, 1e7, above=True),
        metavar="S",
        help=f"of a cell, in seconds ({_TIMEOUT:.0f}; emulated boards {_BOARD_TIMEOUT:.0f})",
    )
    running.add_argument("--memory", metavar="SIZE", help="that a cell may allocate: 8GB")


def read_options(argv: Sequence[str]) -> SweepOptions:
    """The checked command line: ``PLAN ...``, ``GRID.yaml ...`` or options of a grid alone.

    Raises:
        ConfigError: for anything that can be seen to be wrong without a model.
    """
    first = argv[0]
    plan = first if first in PLANS else "grid"
    rest = list(argv) if first.startswith("-") else list(argv[1:])
    arguments = vars(parser(plan).parse_args(rest))
    if not first.startswith("-") and first not in PLANS:
        arguments = _with_grid(arguments, Path(first))
    return _checked(plan, arguments)


def _with_grid(arguments: dict[str, Any], path: Path) -> dict[str, Any]:
    """What a YAML says, where the command line says nothing."""
    source = str(path) if str(path).isprintable() else repr(str(path))
    raw = as_map(parse_yaml(read_text(path, source=source), source), where=source)
    known = (*LISTS[:-1], "rounds", "compute", "threads", "accuracy_text", "base")
    check_keys(raw, known, where=source)
    found = dict(arguments)
    for key, value in raw.items():
        if arguments.get(key) is None:
            found[key] = _from_yaml(key, value, place=f"{source}: {key}")
    return found


def _from_yaml(key: str, value: object, *, place: str) -> object:
    if key in LISTS:
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(each, str) and each for each in values):
            raise ConfigError(f"{place}: no names; allowed: a name, or a list of them")
        return values
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{place}: no value; allowed: one")
    if key in _MOST:
        try:
            return integer(1, _MOST[key])(value)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{place}: {error}") from None
    if key == "compute" and value not in ("fast", "exact"):
        raise ConfigError(f"{place}: {value!r}; allowed: fast, exact")
    return value


def _checked(plan: str, given: Mapping[str, Any]) -> SweepOptions:
    levels = tuple(Level.parse(text) for text in given.get("levels") or _levels(plan))
    cases = given["cases"]
    for name in cases or ():
        _ = CASES[name]
    precisions = tuple(given.get("precisions") or ())
    for name in (*precisions, given["base"] or "bf16"):
        load_precision(name)
    for text in filter(None, (given["accuracy_text"], given.get("held_out"))):
        accuracy_text(text)
    if plan == "grid" and not precisions and not given["resume"]:
        raise ConfigError("a grid without --precisions; allowed: one or more, as tilewright run")
    max_bytes = given.get("max_bytes")
    if plan == "search" and not given["resume"]:
        _check_bounds(given)
    sensitivities = given.get("sensitivities")
    has_board = any(target in BOARDS for target in given["targets"] or ())
    results = Path(given["results"] or DEFAULT_FOLDER / f"{plan}.jsonl")
    check_writable(results, "sweep file")
    return SweepOptions(
        plan=plan,
        asked=_asked(given),
        models=tuple(given["models"] or ("smollm2",)),
        targets=tuple(given["targets"] or ("cpu",)),
        devices=tuple(given["devices"] or ()),
        precisions=precisions,
        cases=tuple(cases) if cases else None,
        rounds=given["rounds"] or 3,
        compute=given["compute"] or "fast",
        threads=given["threads"],
        text=given["accuracy_text"],
        base=given["base"] or "bf16",
        levels=levels,
        min_top1=given.get("min_top1"),
        max_kl=given.get("max_kl"),
        max_bytes=None if max_bytes is None else _size("--max-bytes", max_bytes),
        sensitivities=None if sensitivities is None else Path(sensitivities),
        held_out=given.get("held_out") or "held-out",
        output=None if given.get("output") is None else Path(given["output"]),
        results=results,
        resume=given["resume"],
        dry_run=given["dry_run"],
        yes=given["yes"],
        jobs=min(given["jobs"], os.cpu_count() or 1),
        timeout_s=given["timeout"] or (_BOARD_TIMEOUT if has_board else _TIMEOUT),
        memory=None if given["memory"] is None else _size("--memory", given["memory"]),
    )


def _levels(plan: str) -> tuple[str, ...]:
    return DEFAULT_LEVELS if plan == "search" else ("bfp8",)


def _check_bounds(given: Mapping[str, Any]) -> None:
    bounds = ("min_top1", "max_kl", "max_bytes")
    if all(given.get(name) is None for name in bounds):
        options = ["--" + name.replace("_", "-") for name in bounds]
        raise ConfigError(f"a search without a bound; {allowed(options)}, or several of them")


_PLAN_KEYS = (
    *LISTS,
    "rounds",
    "compute",
    "threads",
    "accuracy_text",
    "base",
    "min_top1",
    "max_kl",
    "max_bytes",
    "sensitivities",
    "held_out",
)


def _asked(given: Mapping[str, Any]) -> dict[str, str]:
    found = {key: given.get(key) for key in _PLAN_KEYS}
    return {
        key: shlex.join(value) if isinstance(value, list) else str(value)
        for key, value in found.items()
        if value is not None
    }


def _size(option: str, text: str) -> int:
    """Bytes of ``1.2GB``, ``300MB``, ``4096``.

    Raises:
        ConfigError: for anything else.
    """
    number = text.strip().lower().rstrip("kmgb")
    unit = text.strip().lower()[len(number) :]
    try:
        value = float(number) * _SIZES[unit]
    except (ValueError, KeyError):
        value = -1.0
    if not 0 < value < 1e18:
        raise ConfigError(f"{option} {text[:40]!r}; allowed: a size such as 1.2GB or 300MB")
    return int(value)
