"""Plans, prints and runs the cells of ``tilewright sweep PLAN``."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.cli.arguments.sweep import SweepOptions, read_options
from tilewright.cli.sweep.files import open_sweep
from tilewright.cli.sweep.progress import sweep_progress
from tilewright.cli.terminal.console import err, note, out, print_table
from tilewright.compiler.precision import load_precision
from tilewright.errors import ConfigError
from tilewright.evaluate.cases.cases import CASES
from tilewright.evaluate.report.table import Columns, Table
from tilewright.evaluate.results.record import RANDOM_WEIGHTS
from tilewright.evaluate.sweep import estimate
from tilewright.evaluate.sweep.calibrated import CalibratedFolders, calibration_name
from tilewright.evaluate.sweep.journal import FAILURES, VERSION, Planned, SweepJournal, TrialCommand
from tilewright.evaluate.sweep.runner import Runner, launcher
from tilewright.evaluate.sweep.trial import Trial
from tilewright.utils.environment import environment
from tilewright.utils.json_lines import TornLineWarning

if TYPE_CHECKING:
    from tilewright.evaluate.sweep.model import SweptModel
    from tilewright.evaluate.sweep.plans import Measures, SweepConfig

EXIT_FAILED_CELLS = 1
_NUM_LISTED = 8


def main(argv: list[str]) -> int:
    """Run a plan or a grid of ``tilewright sweep``. Return the exit code."""
    options = read_options(argv)
    if options.resumes:
        journal = open_journal(options)
        if options.dry_run:
            print_plan([each.cell for each in journal.state.open_cells()], options)
            return 0
        return run_journal(journal, options)
    cells = plan_cells(options)
    if options.dry_run:
        print_plan(cells, options)
        return 0
    journal = SweepJournal.create(options.results, planned(options, cells), cells)
    return run_journal(journal, options)


def open_journal(options: SweepOptions) -> SweepJournal:
    """Open the sweep's journal to resume, which must have the requested plan.

    Raises:
        ConfigError: if the file has another plan or other options.
    """
    journal = open_sweep(options.results)
    recorded = journal.state.planned
    takes_any = options.resume and not options.requested
    if recorded.plan != options.plan or (options.requested != recorded.options and not takes_any):
        differing = {key for key, _ in options.requested.items() ^ recorded.options.items()}
        what = ", ".join(sorted(differing)) or "the plan"
        raise ConfigError(
            f"sweep file {options.results}: holds plan {recorded.plan!r} and differs in {what}; "
            "allowed: the same options, --resume with no other options, or another --results"
        )
    if not options.resume:
        done = journal.state.count("done")
        note(err(), f"resuming {options.results}: {done} of {len(journal.state.cells)} cells done")
    _settle_other_code(journal, options)
    return journal


def _settle_other_code(journal: SweepJournal, options: SweepOptions) -> None:
    """Allow results of different code versions in a table only on request.

    Raises:
        ConfigError: if other code measured cells and `SweepOptions.other_code` is None.
    """
    now = environment()
    cells = journal.state.cells.items()
    others = {key: code for key, each in cells if (code := each.other_code(now))}
    if not others:
        return
    codes, ids = sorted(set(others.values())), list(others)
    listed = ", ".join([*ids[:_NUM_LISTED], *(["..."] if len(ids) > _NUM_LISTED else [])])
    said = f"{journal.path}: {len(ids)} of the cells that are done were measured by other code "
    said += f"({'; '.join(codes)}): {listed}"
    if options.other_code is None:
        raise ConfigError(f"sweep file {said}; allowed: --other-code keep, or --other-code rerun")
    what = "they are kept" if options.other_code == "keep" else "they are run again"
    note(err(), f"{said}; {what}")
    if options.other_code == "rerun" and not options.dry_run:
        journal.append(*(TrialCommand(cell_id, "restart") for cell_id in ids))


def planned(options: SweepOptions, cells: Sequence[Trial]) -> Planned:
    """Return a new sweep's header. The first cell per model and target is the base."""
    surroundings = environment(hash_host=True)
    bases: dict[tuple[str, ...], str] = {}
    for cell in cells:  # keyed by place, because all headings have the same name
        bases.setdefault(cell.place, cell.precision_id)
    return Planned(
        version=VERSION,
        plan=options.plan,
        options=options.requested,
        base=" ".join(dict.fromkeys(bases.values())) or None,
        timestamp=surroundings.timestamp,
        commit=surroundings.commit,
        versions=surroundings.versions,
    )


def swept_models(options: SweepOptions) -> list[SweptModel]:
    """Open a sweep's models.

    Raises:
        CheckpointError, ConfigError: for an invalid model, or for accuracy with random weights.
    """
    warnings.filterwarnings("ignore", module="torch")
    from tilewright.compiler.artifacts.paths import is_compiled
    from tilewright.evaluate.sweep.model import swept_model
    from tilewright.models import load_model

    of_accuracy = [name for name in measures_of(options).cases if CASES[name].token_accuracy]
    for path in options.models:
        if is_compiled(path):
            raise ConfigError(f"{path}: is a compiled folder; allowed: checkpoints")
    found = []
    for path in options.models:
        loaded = load_model(path)
        swept = swept_model(loaded, path)
        if loaded.weights == "random":
            if of_accuracy:
                raise ConfigError(
                    f"{path} with case {of_accuracy[0]!r}: random weights have no accuracy; "
                    "allowed: cases of speed, as --cases performance-ci-1"
                )
            swept = replace(swept, name=f"{swept.name} {RANDOM_WEIGHTS}")
        found.append(swept)
    return found


def plan_cells(options: SweepOptions) -> list[Trial]:
    """Return every cell of a plan, in order.

    Raises:
        TilewrightError: for an unknown or unsuitable model, target, device, case or configuration,
            and for a very large plan.
    """
    from tilewright.evaluate.sweep.plans import cells

    check_targets(options)
    measures = measures_of(options)
    configurations = len(options.models) * len(options.targets) * max(1, len(options.precisions))
    check_size(measures.count(configurations), options)
    found = cells(_entries(options), measures)
    check_size(len(found), options)
    return found


def check_targets(options: SweepOptions) -> None:
    """Raise for an unknown target before a model is opened."""
    from tilewright.compiler.targets.table import get_target

    for target in full_targets(options):
        get_target(target)


def full_targets(options: SweepOptions) -> tuple[str, ...]:
    """Return the full names of the plan's targets.

    ``cpu`` becomes the native kernels if they can be built, else ``cpu-onnxruntime``.
    """
    from tilewright.compiler.targets.cpu.backend import full_name
    from tilewright.compiler.targets.interface.compiled import silent

    return tuple(dict.fromkeys(full_name(target, silent) for target in options.targets))


def measures_of(options: SweepOptions) -> Measures:
    """Return the plan's measurements."""
    from tilewright.evaluate.sweep import plans

    is_table = options.plan == "table"
    usual = (plans.SPEED_CASE, *((plans.BATCH_CASE,) if is_table else ()), plans.ACCURACY_CASE)
    return plans.Measures(
        cases=options.cases or usual,
        rounds=options.rounds,
        compute=options.compute,
        threads=options.threads,
        text=options.accuracy_text,
        speculative=options.speculative_config or "",
    )


def check_size(num_cells: int, options: SweepOptions) -> None:
    """Raise ConfigError for a very large plan without ``--yes``."""
    from tilewright.evaluate.sweep.plans import MAX_CELLS

    if num_cells > MAX_CELLS and not options.yes:
        raise ConfigError(f"a plan of {num_cells} cells; allowed: {MAX_CELLS}, or more with --yes")


def _entries(options: SweepOptions) -> list[SweepConfig]:
    from tilewright.evaluate.sweep import plans

    models = swept_models(options)
    base = load_precision(options.base)
    if options.plan == "sensitivity":
        level = options.levels[0]
        if len(options.levels) > 1:
            raise ConfigError(f"{len(options.levels)} levels; allowed in a sensitivity plan: one")
        places = plans.entries(models, full_targets(options), options.devices, [base])
        return [
            entry
            for place in places
            for entry in plans.sensitivity_entries(
                place.model,
                place.target,
                place.device,
                base=base,
                level=level,
                calibration=calibrations(options)[0],
                cache_layers=options.cache_layers,
            )
        ]
    names = (*plans.NAMED[options.plan], *options.precisions)
    chosen = [base, *map(load_precision, names)]
    plain = plans.entries(models, full_targets(options), options.devices, chosen)
    return [
        replace(entry, calibration=calibration)
        for entry in plain
        for calibration in ([""] if entry.precision is base else calibrations(options))
    ]


def print_plan(cells: Sequence[Trial], options: SweepOptions) -> None:
    """Print cells by configuration with estimated bytes and time, a table per model and target."""
    places: dict[str, dict[tuple[str, ...], list[Trial]]] = {}
    for cell in cells:
        place = places.setdefault(f"{cell.model_name} on {cell.target}", {})
        place.setdefault(cell.configuration, []).append(cell)
    columns: Columns[list[Trial]] = {
        "configuration": lambda cells: cells[0].name,
        "weights (MB, est.)": lambda cells: f"{(cells[0].weight_bytes or 0) / 1e6:,.1f}",
        "cells": lambda cells: str(len(cells)),
        "time (s, est.)": lambda cells: f"{estimate.total_seconds(cells, jobs=options.jobs):,.0f}",
    }
    for title, configurations in places.items():
        table = Table.by(columns, configurations.values())
        print_table(out(), f"sweep {options.plan}: {title}", table, numbers=True)
    total = estimate.total_seconds(cells, jobs=options.jobs)
    out().print(f"{len(cells)} cells, about {total / 60:.0f} min (estimated); nothing was run")


def calibrated_folders(journal: SweepJournal, options: SweepOptions) -> CalibratedFolders:
    """Return the calibrated directory store, in the sweep file's directory."""
    text = options.calibration_text or journal.state.planned.options.get("calibration_text")
    root = journal.path.with_name(f"{journal.path.stem}-calibrated")
    return CalibratedFolders(root.absolute(), None if text is None else Path(text).absolute())


def calibrations(options: SweepOptions) -> list[str]:
    """Return the names of a sweep's calibrations, as in `Trial`."""
    return [calibration_name(method, options.calibration_text) for method in options.calibration]


@contextmanager
def runner_of(journal: SweepJournal, options: SweepOptions) -> Iterator[Runner]:
    """Yield a sweep's runner with progress. Raises ConfigError if another runner is active."""
    launch = launcher(
        timeout_s=options.timeout_s,
        max_bytes=options.memory,
        calibrated=calibrated_folders(journal, options),
    )
    with journal.hold(), sweep_progress(err(), jobs=options.jobs) as report:
        with warnings.catch_warnings():  # opening the file has reported a torn line
            warnings.simplefilter("ignore", TornLineWarning)
            journal.append()
        yield Runner(journal, launch, jobs=options.jobs, report=report)


def run_journal(journal: SweepJournal, options: SweepOptions) -> int:
    """Run the open cells, then print the result. Return the exit code."""
    with runner_of(journal, options) as runner:
        runner.run()
    return say_result(journal)


def say_result(journal: SweepJournal) -> int:
    """Print a line about the end and a line per failure. Return the exit code."""
    state = journal.state
    for each in state.cells.values():
        if each.status in FAILURES:
            err().print(f"{each.cell.title()}: {each.why}", style="red", soft_wrap=True)
    failed = state.count(*FAILURES)
    done, cancelled = state.count("done"), state.count("cancelled")
    err().print(
        f"{journal.path}: {done} of {len(state.cells)} cells done"
        + (f", {failed} failed" if failed else "")
        + (f", {cancelled} cancelled" if cancelled else "")
        + f"; tables: tilewright sweep export {shlex.quote(str(journal.path))}",
        soft_wrap=True,
    )
    return EXIT_FAILED_CELLS if failed else 0
