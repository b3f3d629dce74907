"""``tilewright sweep export`` and ``plot``: sweep results as documents and plots."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.cli.sweep.files import open_sweep
from tilewright.errors import ConfigError
from tilewright.evaluate.cases.cases import ACCURACY_TEXT
from tilewright.evaluate.report import perf_file
from tilewright.evaluate.results.record import Result
from tilewright.evaluate.results.result_file import append, read
from tilewright.evaluate.sweep import summary
from tilewright.evaluate.sweep.export import csv_text, markdown, to_results
from tilewright.evaluate.sweep.journal import Planned, SweepState
from tilewright.evaluate.sweep.leaderboard import (
    LeaderboardEntry,
    comparable,
    make_leaderboard,
    place_name,
)
from tilewright.evaluate.sweep.summary import SweptRow
from tilewright.utils.files import write_file
from tilewright.utils.json_lines import check_writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STDOUT = "-"
_FRONT, _SENSITIVITY = "front", "sensitivity"
_STEM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_LINK = re.compile(r"\]\(((?:precision_cfgs|docs)/[^()\s]+)\)")


def export(given: argparse.Namespace) -> int:
    """Write sweep tables to files. Return the exit code."""
    _check_outputs(given)
    states = {path: open_sweep(path).state for path in dict.fromkeys(given.files)}
    probes = [path for path, state in states.items() if state.planned.plan == _SENSITIVITY]
    if given.perf_md is not None and probes:
        raise ConfigError(
            f"{probes[0]}: a sensitivity sweep's configurations are probes, no rows of a table; "
            "allowed with --perf-md: sweeps of other plans"
        )
    if not (given.markdown or given.csv or given.perf_md):
        given.markdown = _STDOUT
    if given.markdown is not None:
        _write(given.markdown, _document(states, given.markdown))
    if given.csv is not None:
        _write(given.csv, csv_text(*states.values()))
    if given.perf_md is not None:
        _merge(states, given.perf_md, Path(given.results or perf_file.RECORDED))
    return 0


def _check_outputs(given: argparse.Namespace) -> None:
    """Check that every output path is unique and is not an input path."""
    if given.results is not None and given.perf_md is None:
        raise ConfigError("--results without --perf-md; allowed: both")
    outputs = {
        option: path
        for option in ("markdown", "csv", "perf_md", "results")
        if (path := getattr(given, option)) is not None
    }
    taken = {os.path.realpath(path): f"the sweep {path}" for path in given.files}
    for option, path in outputs.items():
        name = "--" + option.replace("_", "-")
        if path == _STDOUT and option in ("perf_md", "results"):
            raise ConfigError(f"{name} {path}; allowed: a file's path")
        where = path if path == _STDOUT else os.path.realpath(path)
        if where in taken:
            raise ConfigError(f"{name} {path}: is {taken[where]} already; allowed: another path")
        taken[where] = f"that of {name}"
        if path != _STDOUT:
            check_writable(path, name)


def _document(states: dict[str, SweepState], output: str) -> str:
    text = "\n".join(markdown(state, _extra(path, state)) for path, state in states.items())
    if output == _STDOUT:
        return text
    folder = Path(output).resolve().parent

    def relative(link: re.Match[str]) -> str:
        return f"]({os.path.relpath(Path(link[1]).resolve(), folder)})"

    # Links are relative to the repository's root.
    return _LINK.sub(relative, text) if Path("precision_cfgs").is_dir() else text


def _extra(path: str, state: SweepState) -> str:
    """Return a sensitivity sweep's sections, empty before its base is measured."""
    if state.planned.plan != _SENSITIVITY:
        return ""
    from tilewright.evaluate.sweep import sensitivity_report

    try:
        return sensitivity_report.markdown(state)
    except ConfigError as error:
        _say(f"{path}: without its sensitivities: {error}")
        return ""


def _merge(states: dict[str, SweepState], output: str, path: Path) -> None:
    """Append records to the results file, and update the tables in ``output``."""
    known = read(path) if path.exists() else []
    new: list[Result] = []
    for state in states.values():
        new += to_results(state, [*known, *new])
    if not known and not new:
        raise ConfigError(
            f"{', '.join(states)}: no configuration is finished, and {path} has no results; "
            "allowed: a finished sweep"
        )
    perf_file.check_file(output)
    for result in new:
        append(path, result)
    _say(f"{path}: {len(new)} new results")
    _say(perf_file.update_tables(output, [*known, *new, *perf_file.read_beside(path)]))


def _write(output: str, text: str) -> None:
    if output == _STDOUT:
        print(text, end="")
        return
    write_file(Path(output), text.encode())
    _say(f"{output}: {len(text.splitlines())} lines")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def plot(given: argparse.Namespace) -> int:
    """Draw sweep plots into files. Return the exit code."""
    if given.name is not None and not _STEM.fullmatch(given.name):
        raise ConfigError(f"--name {given.name[:60]!r}; allowed: letters, digits, '-', '_', '.'")
    states = {path: open_sweep(path).state for path in dict.fromkeys(given.files)}
    fronts = {path: each for path, each in states.items() if each.planned.plan != _SENSITIVITY}
    figures = [
        (stem if given.name is None else f"{given.name}-{stem}", figure)
        for path, state in states.items()
        if path not in fronts
        for stem, figure in _heat_maps(path, state)
    ]
    if fronts:
        figures += _fronts(fronts, given.name or _FRONT)
    stems = [stem for stem, _ in figures]
    if double := next((stem for stem in stems if stems.count(stem) > 1), None):
        raise ConfigError(f"two figures {double!r}; allowed: one sweep at a time, or --name")
    from tilewright.evaluate.plots.plot import save

    for stem, figure in figures:
        for written in save(figure, Path(given.output) / stem):
            _say(f"{written}: written")
    return 0


def _heat_maps(path: str, state: SweepState) -> list[tuple[str, Figure]]:
    from tilewright.evaluate.sweep import sensitivity_report

    try:
        found = sensitivity_report.heat_maps(state)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not found:
        raise ConfigError(f"{path}: no single layer is measured; allowed: a sweep with layers")
    return found


def _fronts(states: dict[str, SweepState], name: str) -> list[tuple[str, Figure]]:
    """Return a plot for each set of comparable rows with a point.

    Raises:
        ConfigError: if no row has a point.
    """
    found = [row for state in states.values() for row in summary.rows(state)]
    if len(states) > 1:  # rounds of different sweeps are not paired
        found = [summary.in_rounds(row, []) for row in found]
    groups: dict[tuple[str, ...], list[LeaderboardEntry]] = {}
    for each in make_leaderboard(found):
        if each.placed is not None:
            groups.setdefault(comparable(each.row), []).append(each)
    if not groups:
        raise ConfigError(
            f"{', '.join(states)}: no configuration has both speed and accuracy yet; allowed: a "
            "sweep in which both cells of one are done"
        )
    if len(states) > 1:
        _say(
            f"{len(states)} sweeps in one front: their rounds were not taken in turn, so that what "
            "the machine did meanwhile counts as a difference in speed"
        )
    stems = _stems(list(groups), name)
    headers = [state.planned for state in states.values()]
    return [
        (stem, _draw(members, headers))
        for stem, members in zip(stems, groups.values(), strict=True)
    ]


def _stems(keys: Sequence[tuple[str, ...]], name: str) -> list[str]:
    """Return ``name`` for a single plot, else names with models, targets and devices."""
    if len(keys) == 1:
        return [name]
    found: list[str] = []
    for model, _, target, device, compute, *_ in keys:
        parts = (model, target, device, *([] if compute == "fast" else [compute]))
        stem = f"{name}-" + re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")
        number = sum(each == stem or each.startswith(f"{stem}.") for each in found)
        found.append(f"{stem}.{number + 1}" if number else stem)
    return found


def _draw(members: Sequence[LeaderboardEntry], headers: Sequence[Planned]) -> Figure:
    from tilewright.evaluate.plots.plot import draw_front

    row = members[0].row
    accuracy, speed = row.accuracy, row.speed_result
    assert accuracy is not None and speed is not None
    base = next((each for each in members if _is_base(each.row, headers)), None)
    text = "" if accuracy.text == ACCURACY_TEXT else f", text {accuracy.text}"
    emulated, predicted = ("emulated ", "predicted ") if row.is_emulated else ("", "")
    return draw_front(
        [each.placed for each in members if each.placed is not None],
        title=f"{place_name(row)}: {predicted}speed against {emulated}top-1",
        speed_label=f"{predicted}speed (t/s/u), case {speed.case}",
        accuracy_label=f"{emulated}top-1 (%) of {accuracy.num_positions} positions{text}",
        base=None if base is None else base.label,
    )


def _is_base(row: SweptRow, headers: Sequence[Planned]) -> bool:
    """Return whether a (merged) row contains the base configuration."""
    return any(header.is_base(state.cell) for header in headers for state in row.states)
