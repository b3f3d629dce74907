"""``tilewright sweep search``: from sensitivities to a measured configuration and its YAML.

What was measured already is taken from the sweep's file: a resumed search asks for the same cells
again and goes on where it stood.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compiler.bench.json_lines import check_writable
from compiler.bench.sweep.journal import Journal
from compiler.commands.console import err, out, print_table
from compiler.commands.sweep.files import open_sweep
from compiler.commands.sweep.options import DEFAULT_FOLDER, SweepOptions, read_options
from compiler.commands.sweep.run import (
    check_targets,
    open_journal,
    planned,
    print_plan,
    runner_of,
    swept_models,
)
from compiler.errors import ConfigError

EXIT_NOTHING_FOUND = 1


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = read_options(argv)
    if options.resume:
        options = _as_begun(options)
    if len(options.models) > 1 or len(options.targets) > 1:
        raise ConfigError("a search over several models or targets; allowed: one of each")
    if options.output is not None:
        check_writable(options.output, "--output")
    check_targets(options)
    return _search(options)


def _as_begun(options: SweepOptions) -> SweepOptions:
    """A search that is resumed without its options has those it was begun with."""
    begun = open_journal(options).state.planned.options
    argv = ["search"]
    for key, value in begun.items():
        option = "from" if key == "sensitivities" else key.replace("_", "-")
        argv += [f"--{option}", *value.split(" ")]
    known = read_options(argv)
    running = ("results", "resume", "dry_run", "yes", "jobs", "timeout_s", "memory", "output")
    return replace(known, **{name: getattr(options, name) for name in running})


def _search(options: SweepOptions) -> int:
    from compiler.bench.sweep import hunt
    from compiler.bench.sweep.bounds import Bounds
    from compiler.bench.sweep.found import COLUMNS

    (model,) = swept_models(options)
    subject = hunt.subject(model, options.targets[0], options.devices, options.base)
    settings = hunt.Settings(
        bounds=Bounds(options.min_top1, options.max_kl, options.max_bytes),
        levels=options.levels,
        rounds=options.rounds,
        cases=options.cases,
        compute=options.compute,
        threads=options.threads,
        text=options.text,
        held_out=options.held_out,
    )
    known = _known_sensitivities(options)
    first = hunt.first_cells(subject, settings, known)
    if options.dry_run:
        print_plan(first, options)
        out().print("and, when these are known, about 12 cells that depend on them")
        return 0
    if options.resume:
        journal = open_journal(options)
    else:
        journal = Journal.create(options.results, planned(options, first), first)
    with runner_of(journal, options) as runner:
        found = hunt.hunt(subject, settings, runner, known)
    print_table(out(), f"search: {settings.bounds}", COLUMNS, found.table(), numbers=True)
    for line in found.comments:
        out().print(line)
    if found.yaml is None:
        err().print(f"no configuration within {settings.bounds} was found", style="red")
        return EXIT_NOTHING_FOUND
    path = options.output or journal.path.with_suffix(".yaml")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found.yaml, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    out().print(f"written: {path}")
    return 0


def _known_sensitivities(options: SweepOptions) -> Journal | None:
    """The sweep of sensitivities to search by; without one the search measures them itself."""
    path = options.sensitivities or DEFAULT_FOLDER / "sensitivity.jsonl"
    if options.sensitivities is None and not Path(path).exists():
        err().print(f"{path}: not there; the search measures the sensitivities first", style="dim")
        return None
    return open_sweep(path)
