"""``tilewright sweep search``: from sensitivities to a measured configuration and its YAML.

The sweep file has the finished measurements. A resumed search requests the same cells and continues
after them.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tilewright.cli.arguments.sweep import (
    DEFAULT_FOLDER,
    LISTS,
    RUNNING,
    SweepOptions,
    read_options,
)
from tilewright.cli.sweep import run
from tilewright.cli.sweep.files import open_sweep
from tilewright.cli.terminal.console import err, note, out, print_table
from tilewright.compiler.devices import BOARDS
from tilewright.errors import ConfigError
from tilewright.evaluate.cases.cases import ACCURACY_TEXT, CASES
from tilewright.evaluate.cases.prompts import accuracy_text
from tilewright.evaluate.sweep.journal import SweepJournal
from tilewright.models.checkpoints.calibrated.manifest import is_calibrated
from tilewright.utils.files import write_file
from tilewright.utils.json_lines import check_writable

EXIT_NOTHING_FOUND = 1


def main(argv: list[str]) -> int:
    """Run ``tilewright sweep search``. Return the exit code."""
    options = read_options(argv)
    begun = run.open_journal(options) if options.resumes else None
    if begun is not None:
        options = _as_begun(options, begun)
    if len(options.models) > 1 or len(options.targets) > 1:
        raise ConfigError("a search over several models or targets; allowed: one model and target")
    if boards := [target for target in options.targets if target in BOARDS]:
        raise ConfigError(
            f"a search on {boards[0]}: it compares speeds measured in turn, and a board's is "
            "predicted; allowed there: the plans pareto, table, sensitivity and grids"
        )
    if len({CASES[name].token_accuracy for name in options.cases or ()}) == 1:
        raise ConfigError(
            "--cases of one kind; allowed in a search: a speed case and an accuracy case"
        )
    check_writable(_output(options), "--output")
    if _output(options).absolute() == options.results.absolute():
        raise ConfigError(f"--output {_output(options)}: is the sweep's file; allowed: another")
    searched = accuracy_text(options.accuracy_text or ACCURACY_TEXT)
    if accuracy_text(options.held_out).content == searched.content:
        raise ConfigError(
            f"--held-out {options.held_out[:60]!r}: is what is searched on; allowed: another text"
        )
    run.check_targets(options)
    return _search(options, begun)


def _as_begun(options: SweepOptions, begun: SweepJournal) -> SweepOptions:
    """Return the original options for a search that is resumed without options."""
    argv = ["search", f"--results={options.results}"]
    for key, value in begun.state.planned.options.items():
        option = "from" if key == "sensitivities" else key.replace("_", "-")
        try:
            values = shlex.split(value) if key in LISTS else []
        except ValueError:
            raise ConfigError(f"{begun.path}: option {key[:40]!r}: no list of names") from None
        argv += [f"--{option}", *values] if key in LISTS else [f"--{option}={value}"]
    known = read_options(argv)
    return replace(known, **{name: getattr(options, name) for name in RUNNING})


def _output(options: SweepOptions) -> Path:
    return options.output or options.results.with_suffix(".yaml")


def _search(options: SweepOptions, begun: SweepJournal | None) -> int:
    from tilewright.evaluate.search import plan as search_plan
    from tilewright.evaluate.search.search_runner import hunt

    usual, target = run.measures_of(options), run.full_targets(options)[0]
    run.check_size(usual.count(1 + len(options.levels)), options)
    (model,) = run.swept_models(options)
    device, base = search_plan.searched_place(model, target, options.devices, options.base)
    search = search_plan.SearchSpec(
        model=model,
        target=target,
        device=device,
        base=base,
        bounds=search_plan.Bounds(options.min_top1, options.max_kl, options.max_bytes),
        levels=options.levels,
        usual=usual,
        held_out=options.held_out,
        takes_other_code=options.other_code == "keep",
        calibration=run.calibrations(options)[0],
    )
    known = _known_sensitivities(options, search.fits)
    first = search.first_cells(known)
    run.check_size(len(first), options)
    if options.dry_run:
        run.print_plan(first, options)
        out().print("and, when these are known, about 12 cells that depend on them")
        return 0
    journal = begun or SweepJournal.create(options.results, run.planned(options, first), first)
    with run.runner_of(journal, options) as runner:
        found = hunt(search, runner, known)
    print_table(out(), f"search: {search.bounds}", found.table(), numbers=True)
    for line in found.comments:
        out().print(line, soft_wrap=True)
    if found.yaml is None:
        said = f"no configuration within {search.bounds} is better than the uniform ones"
        err().print(said, style="red", soft_wrap=True)
        return EXIT_NOTHING_FOUND
    path = _output(options)
    if (winner := found.cell) is not None and winner.calibration:
        _copy_folder(run.calibrated_folders(journal, options).folder(winner), path)
    write_file(path, found.yaml.encode())
    out().print(f"written: {path}", soft_wrap=True)
    return 0


def _folder_beside(path: Path) -> Path:
    return path.with_suffix(".calibrated")


def _copy_folder(weights: Path, path: Path) -> None:
    """Copy the winner's weights to its YAML's directory, completely or not at all."""
    folder = _folder_beside(path)
    if folder.exists() and not is_calibrated(folder):
        raise ConfigError(f"{folder}: is in the way; allowed: another --output, then --resume")
    partial = folder.with_name(f"{folder.name}.writing")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(weights, partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(
            f"{folder}: cannot be written ({error.strerror or error}); allowed: a folder with "
            "free space, then --resume"
        ) from None
    out().print(f"written: {folder}", soft_wrap=True)


def _known_sensitivities(
    options: SweepOptions, fits: Callable[[SweepJournal], bool]
) -> SweepJournal | None:
    """Return a sensitivity sweep for the search, or None to measure the sensitivities first."""
    if options.sensitivities is not None:
        return open_sweep(options.sensitivities)
    path = DEFAULT_FOLDER / "sensitivity.jsonl"
    found = open_sweep(path) if path.exists() else None
    if found is not None and fits(found):
        note(err(), f"by the sensitivities in {path}")
        return found
    why = "not there" if found is None else "of something else"
    note(err(), f"{path}: {why}; the search measures the sensitivities first")
    return None
