"""Options of ``tilewright sweep PLAN``, checked before any heavy import."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tilewright.compiler.devices import BOARDS
from tilewright.compiler.precision import load_precision
from tilewright.compiler.precision.fragment import as_map, check_keys
from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.cases.cases import CASES
from tilewright.evaluate.cases.prompts import accuracy_text
from tilewright.evaluate.search.levels import Level
from tilewright.evaluate.sweep.trial import METHODS
from tilewright.options.arguments import (
    Parser,
    add_options,
    integer,
    names_of,
    option,
    real,
    words_of,
)
from tilewright.options.engine_config import speculative_json
from tilewright.utils.json_lines import check_writable
from tilewright.utils.plain_yaml import parse_yaml, read_text

PLANS = {
    "table": "performance and accuracy of every model, and the base",
    "pareto": "speed against top-1 for the twelve published settings",
    "sensitivity": "lower a single group, or a group in a single layer, at a time",
    "search": "the fastest configuration within a bound, from sensitivities",
    "grid": "models x targets x devices x precisions x cases x rounds",
}
DEFAULT_FOLDER = Path("results/sweeps")
DEFAULT_LEVELS = ("q80", "bfp8", "q40", "bfp4")
BOUNDS = ("min_top1", "max_kl", "max_bytes")
_ONLY_IN = {
    **dict.fromkeys(("precisions", "speculative_config"), ("grid", "pareto", "table")),
    "levels": ("sensitivity", "search"),
    "cache_layers": ("sensitivity",),
    **dict.fromkeys((*BOUNDS, "sensitivities", "held_out", "output"), ("search",)),
}
_USUAL: dict[str, Any] = {
    "models": ("smollm2",),
    "targets": ("cpu",),
    "devices": (),
    "precisions": (),
    "calibration": ("none",),
    "cache_layers": False,
    "rounds": 3,
    "compute": "fast",
    "base": "bf16",
    "held_out": "held-out",
}
_TIMEOUT, _BOARD_TIMEOUT = 900.0, 3600.0
_SIZES = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_WHAT, _SEARCH, _RUN = "what is measured", "the search", "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """The checked command line of a sweep. None: the plan has the default.

    ``requested`` contains the plan's given options as text. A resumed sweep needs equal options.
    """

    plan: str
    requested: dict[str, str]
    models: tuple[str, ...] = option(
        "model paths, as for tilewright bench (default: smollm2)",
        group=_WHAT,
        nargs="+",
        metavar="PATH",
    )
    targets: tuple[str, ...] = option(
        "targets (default: cpu, with native kernels if built)",
        group=_WHAT,
        nargs="+",
        metavar="NAME",
    )
    devices: tuple[str, ...] = option(
        "devices (default: chosen by the target)", group=_WHAT, nargs="+", metavar="NAME"
    )
    precisions: tuple[str, ...] = option(
        "configurations, as for tilewright bench, added to the plan's own (default: none)",
        group=_WHAT,
        nargs="+",
        metavar="NAME",
    )
    cases: tuple[str, ...] | None = option(
        "cases of tilewright bench --list (default: the plan's)",
        group=_WHAT,
        nargs="+",
        metavar="NAME",
    )
    levels: tuple[Level, ...] = option(
        f"lower formats for groups (default: sensitivity bfp8, search {' '.join(DEFAULT_LEVELS)})",
        group=_WHAT,
        nargs="+",
        metavar="FORMAT[:FIDELITY]",
    )
    rounds: int = option(
        "rounds of every speed case (default: 3)", group=_WHAT, type=integer(1, 10_000)
    )
    compute: str = option("arithmetic (default: fast)", group=_WHAT, choices=("fast", "exact"))
    threads: int | None = option(
        "threads for a speed measurement (default: all cores)",
        group=_WHAT,
        type=integer(1, 1024),
    )
    accuracy_text: str | None = option(
        "text for accuracy, as for tilewright bench (default: accuracy)",
        group=_WHAT,
        metavar="TEXT",
    )
    calibration: tuple[str, ...] = option(
        "weights for all configurations except the base: none (round to nearest), rtn, imatrix or "
        "gptq, see tilewright calibrate. sensitivity and search take one method (default: none)",
        group=_WHAT,
        nargs="+",
        metavar="METHOD",
    )
    calibration_text: Path | None = option(
        "UTF-8 text for calibration (default: the package's)", group=_WHAT, metavar="FILE"
    )
    speculative_config: str | None = option(
        "also measure acceptance of these drafts in speed cases, as for tilewright bench "
        "(default: no drafts)",
        group=_WHAT,
        type=speculative_json,
        metavar="JSON",
    )
    cache_layers: bool = option(
        "also lower the KV cache layer by layer (default: all layers together)",
        group=_WHAT,
        default=False,
    )
    base: str = option("baseline configuration (default: bf16)", group=_WHAT, metavar="NAME")
    min_top1: float | None = option(
        "minimum top-1, as 95 (default: no bound)",
        group=_SEARCH,
        type=real(0, 100),
        metavar="PERCENT",
    )
    max_kl: float | None = option(
        "maximum divergence from fp32, as 0.01 (default: no bound)",
        group=_SEARCH,
        type=real(0, 100),
        metavar="NATS",
    )
    max_bytes: int | None = option(
        "maximum weight size, as 1.2GB or 300MB (default: no bound)",
        group=_SEARCH,
        metavar="SIZE",
    )
    sensitivities: Path | None = option(
        "sensitivity sweep file (default: the usual file if it fits, else measure first)",
        "--from",
        group=_SEARCH,
        metavar="FILE",
    )
    held_out: str = option(
        "text for the confirmation (default: held-out)", group=_SEARCH, metavar="TEXT"
    )
    output: Path | None = option(
        "YAML file for the winner (default: in the directory of the sweep file)",
        "-o",
        "--output",
        group=_SEARCH,
        metavar="YAML",
    )
    results: Path = option(
        f"sweep file (default: {DEFAULT_FOLDER / 'PLAN'}.jsonl, or the name of the YAML)",
        group=_RUN,
        metavar="FILE",
    )
    resume: bool = option(
        "require an existing file and use its options. Without --resume, an existing file with "
        "equal options is resumed",
        group=_RUN,
        default=False,
    )
    other_code: str | None = option(
        "keep or rerun measurements of other code",
        group=_RUN,
        choices=("keep", "rerun"),
    )
    dry_run: bool = option("print the cells' bytes and time", group=_RUN, default=False)
    yes: bool = option("allow a very large plan", group=_RUN, default=False)
    jobs: int = option(
        "concurrent accuracy cells (default: 1)", group=_RUN, default=1, type=integer(1, 256)
    )
    timeout_s: float = option(
        "time limit per cell, in seconds "
        f"(default: {_TIMEOUT:.0f}, on emulated boards {_BOARD_TIMEOUT:.0f})",
        "--timeout",
        group=_RUN,
        type=real(0, 1e7, above=True),
        metavar="S",
    )
    memory: int | None = option(
        "memory limit per cell, as 8GB (default: no limit)", group=_RUN, metavar="SIZE"
    )

    @property
    def resumes(self) -> bool:
        """Return whether the results file contains an earlier part of this sweep."""
        return self.resume or self.results.exists()


_MEASURED = names_of(SweepOptions, _WHAT)
LISTS = [name for name in _MEASURED if "nargs" in words_of(SweepOptions, name)]
RUNNING = ("output", *names_of(SweepOptions, _RUN))
"""Options without influence on the results."""
_IN_YAML = [name for name in _MEASURED if name not in ("levels", "cache_layers")]
_GIVEN = [*_MEASURED, *(name for name in names_of(SweepOptions, _SEARCH) if name != "output")]


def parser(plan: str) -> argparse.ArgumentParser:
    """Return the parser for a plan's options."""
    found = Parser(prog=f"tilewright sweep {plan}", description=PLANS[plan])
    without = [name for name, plans in _ONLY_IN.items() if plan not in plans]
    add_options(found, SweepOptions, without=without)
    return found


def read_options(argv: Sequence[str]) -> SweepOptions:
    """Return the checked command line: ``PLAN ...``, ``GRID.yaml ...`` or options of a grid only.

    Raises:
        ConfigError: for every mistake that is visible without a model.
    """
    first = argv[0]
    plan = first if first in PLANS else "grid"
    rest = list(argv) if first.startswith("-") else list(argv[1:])
    arguments = vars(parser(plan).parse_args(rest))
    if not first.startswith("-") and first not in PLANS:
        arguments = _with_grid(arguments, Path(first))
    name = plan if first in PLANS or first.startswith("-") else Path(first).stem
    return _checked(plan, arguments, name=name)


def _with_grid(arguments: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the arguments with a YAML file's values for absent options."""
    source = str(path) if str(path).isprintable() else repr(str(path))
    raw = as_map(parse_yaml(read_text(path, source=source), source), where=source)
    check_keys(raw, _IN_YAML, where=source)
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
    words = words_of(SweepOptions, key)
    if value not in (choices := words.get("choices", (value,))):
        raise ConfigError(f"{place}: {value!r}; {allowed(choices, value)}")
    try:
        return words.get("type", str)(value)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{place}: {error}") from None


def _checked(plan: str, given: Mapping[str, Any], *, name: str) -> SweepOptions:
    """Check the arguments and fill in defaults. ``name`` is the file's default stem."""
    found: dict[str, Any] = {field.name: given.get(field.name) for field in fields(SweepOptions)}
    for key in (*LISTS, *_USUAL):
        value = found[key] or _USUAL.get(key)
        found[key] = tuple(value) if key in LISTS and value is not None else value
    for case in found["cases"] or ():
        _ = CASES[case]
    for precision in (*found["precisions"], found["base"]):
        load_precision(precision)
    _check_calibration(found["calibration"], is_single=plan in ("sensitivity", "search"))
    for text in filter(None, (found["accuracy_text"], given.get("held_out"))):
        accuracy_text(text)
    found["results"] = Path(found["results"] or DEFAULT_FOLDER / f"{name}.jsonl")
    if not found["resume"]:
        _check_options(plan, found)
    usual_levels = DEFAULT_LEVELS if plan == "search" else ("bfp8",)
    has_board = any(target in BOARDS for target in found["targets"])
    if has_board and found["speculative_config"] is not None:
        raise ConfigError(
            "--speculative-config with an emulated board: it verifies no drafts; allowed: cpu, cuda"
        )
    for key in ("sensitivities", "output", "calibration_text"):
        found[key] = None if found[key] is None else Path(found[key])
    for key in ("max_bytes", "memory"):
        option_name = "--" + key.replace("_", "-")
        found[key] = None if found[key] is None else _size(option_name, found[key])
    found |= {
        "plan": plan,
        "requested": _option_texts(given),
        "levels": tuple(map(Level.parse, found["levels"] or usual_levels)),
        "jobs": min(found["jobs"], os.cpu_count() or 1),
        "timeout_s": found["timeout_s"] or (_BOARD_TIMEOUT if has_board else _TIMEOUT),
    }
    check_writable(found["results"], "sweep file")
    return SweepOptions(**found)


def _check_calibration(methods: Sequence[str], *, is_single: bool) -> None:
    for method in methods:
        if method not in METHODS:
            raise ConfigError(f"calibration {method[:40]!r}; {allowed(METHODS, method)}")
    if is_single and len(methods) > 1:
        raise ConfigError(f"{len(methods)} calibrations; allowed in sensitivity and search: 1")


def _check_options(plan: str, found: Mapping[str, Any]) -> None:
    if plan != "search" and found["other_code"] is not None and not found["results"].exists():
        raise ConfigError(
            f"--other-code with a new sweep {found['results']}; allowed: with the file of an "
            "earlier run"
        )
    if plan == "grid" and not found["precisions"]:
        raise ConfigError("a grid without --precisions; allowed: one or more, as tilewright bench")
    if plan == "search" and all(found[name] is None for name in BOUNDS):
        options = ["--" + name.replace("_", "-") for name in BOUNDS]
        raise ConfigError(f"a search without a bound; {allowed(options)}, or several of them")


def _option_texts(given: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: shlex.join(value) if isinstance(value, list) else str(value)
        for key in _GIVEN
        if (value := given.get(key)) not in (None, False)
    }


def _size(option: str, text: str) -> int:
    """Return the byte count in ``1.2GB``, ``300MB`` or ``4096``.

    Raises:
        ConfigError: for another text.
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
