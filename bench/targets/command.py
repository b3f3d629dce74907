"""``bench compare-targets``: one model on several targets, position by position over windows.

Runs made on another machine are joined by their lines (``--merge``).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.compiler.devices import check_gpu
from tilewright.compiler.precision import PrecisionConfig, load_precision
from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.report.display import percent
from tilewright.evaluate.report.table import Columns, Table
from tilewright.evaluate.results import target_runs
from tilewright.models import find_model
from tilewright.options.arguments import integer, option, parse
from tilewright.utils.environment import environment
from tilewright.utils.json_lines import Located, check_writable

if TYPE_CHECKING:
    from tilewright.compiler.targets.interface.base import Progress
    from tilewright.compiler.targets.interface.compiled import Compiled
    from tilewright.evaluate.measure.accuracy import Predictions, Truth
    from tilewright.evaluate.results.record import Paired
    from tilewright.evaluate.results.stats import Ratio
    from tilewright.loading.source import Source

TARGETS = ("cpu", "cuda", "reference")
_PRECISIONS = ("bf16", "accuracy", "performance")
_LEAST_SHOWN = 0.001
_Run = Located[target_runs.TargetRun]


@dataclass(frozen=True, slots=True)
class Choice:
    """A target and its arithmetic, as ``cpu`` or ``cpu:exact``."""

    target: str
    compute: str


def _choice(text: str) -> Choice:
    target, separator, compute = text.partition(":")
    if target not in TARGETS or (separator and compute != "exact"):
        names = [name for target in TARGETS for name in (target, f"{target}:exact")]
        raise ConfigError(f"--runs {text!r}; {allowed(names)}")
    return Choice(target, compute or "fast")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line of ``python -m bench compare-targets``."""

    model: str | None = option("as of tilewright run (default: smollm2)", metavar="PATH")
    precision: tuple[PrecisionConfig, ...] = option(
        f"of every run ({' '.join(_PRECISIONS)})",
        default=tuple(map(load_precision, _PRECISIONS)),
        metavar="NAME",
        type=load_precision,
    )
    runs: tuple[Choice, ...] = option(
        f"of {', '.join(TARGETS)}; others are compared with {target_runs.BASE_RUN} and "
        f"{target_runs.EXACT_RUN}",
        default=(),
        metavar="TARGET[:exact]",
        type=_choice,
    )
    windows: int = option("default: 8", default=8, type=integer(1))
    batch: int = option("windows run side by side (default: 1)", default=1, type=integer(1, 1024))
    threads: int | None = option("CPU threads (default: all cores)", type=integer(1, 1024))
    out: Path | None = option("add a line for every run to this file", metavar="FILE", type=Path)
    merge: tuple[Path, ...] = option(
        "show the runs of these files too", default=(), metavar="FILE", type=Path
    )


def read_options(argv: Sequence[str]) -> Options:
    """The checked command line, no choice in it twice. Raises TilewrightError."""
    found = parse(
        Options,
        argv,
        prog="python -m bench compare-targets",
        description="Compare targets with the fp32 reference and with each other, position by "
        "position: 512 teacher-forced predictions a window.",
    )
    if not found.runs and not found.merge:
        raise ConfigError("nothing to compare; allowed: --runs, --merge, or both")
    if any(choice.target == "cuda" for choice in found.runs):
        check_gpu()
    if found.out is not None:
        check_writable(found.out, "runs file")
        if not found.runs:
            raise ConfigError(f"--out {found.out} without --runs; allowed: both, or neither")
    return replace(
        found,
        precision=tuple({each.name: each for each in found.precision}.values()),
        runs=tuple(dict.fromkeys(found.runs)),
        batch=min(found.batch, found.windows),
    )


def main(argv: list[str]) -> int:
    """Read other runs, make ours, print the table; returns the exit code.

    Raises:
        TilewrightError: as every command.
    """
    options = read_options(argv)
    located = [each for path in options.merge for each in target_runs.read_runs(path)]
    if options.runs:
        located += _measure_all(options, located)
    if not located:
        raise ConfigError(f"{options.merge[0]}: holds no run; allowed: one or more")
    place, run = located[0].place, located[0].record
    target_runs.check_same(located, model_hash=run.model_hash, text_hash=run.text_hash, what=place)
    _print(target_runs.compare_runs(target_runs.latest(located)))
    return 0


@dataclass(frozen=True, slots=True)
class _Work:
    """What all runs of ours share."""

    source: Source
    options: Options
    text_hash: str
    windows: Sequence[Truth]


def _measure_all(options: Options, merged: Sequence[_Run]) -> list[_Run]:
    """Our own runs, one after another, each recorded when it is done."""
    from tilewright.cli.terminal.console import compile_progress, err

    screen, found = err(), []
    started = time.perf_counter()

    def tell(what: str) -> None:
        nonlocal started
        now = time.perf_counter()
        screen.print(f"{what}: {now - started:.0f} s", style="dim")
        started = now

    with compile_progress(screen) as progress:
        work = _prepare(options, merged, progress)
        tell("fp32 reference")
        for precision in options.precision:
            for choice in options.runs:
                run = _measure(work, precision, choice=choice, progress=progress)
                found.append(Located("a run made now", run))
                if options.out is not None:
                    target_runs.append_run(options.out, run)
                tell(f"{run.precision} on {run.run}")
    return found


def _prepare(options: Options, merged: Sequence[_Run], progress: Progress) -> _Work:
    """The model, the windows, and the fp32 model on them.

    Raises:
        ConfigError: for runs to merge with that are of something else, before time is spent.
    """
    from tilewright.cli.measure.measure import compile_reference, subject_of
    from tilewright.evaluate.cases.windows import build_windows, cut_windows, windows_hash
    from tilewright.loading.source import open_source

    source = open_source(find_model(options.model))
    subject, _ = subject_of(source)
    tokens = cut_windows(source.tokenizer.encode, options.windows)
    text_hash = windows_hash(tokens)
    target_runs.check_same(
        merged, model_hash=source.content_hash, text_hash=text_hash, what="what is to be run"
    )
    executable = compile_reference(source.checkpoint_model(), progress)
    windows = build_windows(
        executable,
        subject,
        tokens,
        on_window=lambda done, total: progress("reference", done, total),
    )
    executable.close()
    return _Work(source, options, text_hash, windows)


def _measure(
    work: _Work, precision: PrecisionConfig, *, choice: Choice, progress: Progress
) -> target_runs.TargetRun:
    """Compile one precision for one target, and force all windows through it."""
    from tilewright.compiler.targets.interface.base import CompileOptions
    from tilewright.evaluate.cases.cases import ACCURACY_CONTEXT
    from tilewright.evaluate.measure.accuracy import teacher_force
    from tilewright.loading.source import compile_source
    from tilewright.options.arguments import ModelOptions

    options = work.options
    compiled = compile_source(
        work.source,
        ModelOptions(work.source.path, choice.target, choice.compute, precision, None),
        CompileOptions(
            max_batch=options.batch,
            max_context=ACCURACY_CONTEXT,
            compute=choice.compute,
            num_threads=options.threads,
        ),
        progress,
        use_cache=True,
    )
    predictions = teacher_force(
        compiled.executable,
        work.windows,
        batch=options.batch,
        on_step=lambda done, total: progress(choice.target, done, total),
    )
    run = _record(work, compiled, predictions)
    compiled.executable.close()
    return run


def _record(work: _Work, compiled: Compiled, predictions: Predictions) -> target_runs.TargetRun:
    from tilewright.cli.measure.measure import device_of

    fives = [five for reference, _ in work.windows for five in reference.guesses]
    values: dict[str, Any] = target_runs.figures(predictions.guesses, fives, predictions.kl)
    values |= dataclasses.asdict(environment(hash_host=True))
    device, detail = device_of(compiled, work.options.threads)
    return target_runs.TargetRun(
        version=target_runs.VERSION,
        model=work.source.name,
        model_hash=work.source.content_hash,
        text_hash=work.text_hash,
        num_windows=len(work.windows),
        precision=compiled.precision.name,
        precision_id=compiled.precision.id,
        heading=compiled.precision.heading,
        effective_id=compiled.executable.contract.effective_id,
        target=compiled.target,
        compute=compiled.compute,
        batch=work.options.batch,
        device=device,
        device_detail=detail,
        **values,
    )


def _print(rows: Sequence[target_runs.Compared]) -> None:
    from tilewright.cli.terminal.console import out, print_table

    screen, first = out(), rows[0].run
    title = f"{first.model}: {first.num_windows} windows, {first.num_positions} positions"
    print_table(screen, title, Table.by(FIGURES, rows), numbers=True)
    title = "paired: KL ratio ± 95 %; top-1 lost, won, McNemar's p"
    devices = dict.fromkeys(f"{row.run.run}: {row.run.device_detail}" for row in rows)
    print_table(screen, title, Table.by(PAIRED, rows, *devices), numbers=True)
    unlike = max(row.num_unlike for row in rows)
    if unlike:
        screen.print(
            f"the fp32 references differ at up to {unlike} positions; "
            f"top-1 is against that of {first.precision} on {first.run}"
        )


def _ratio_cell(ratio: Ratio | None) -> str:
    if ratio is None or ratio.interval is None:
        return "-"
    return f"{ratio.ratio:.3f} ± {ratio.interval[1] - ratio.ratio:.3f}"


def _mcnemar_cell(pair: Paired | None) -> str:
    if pair is None:
        return "-"
    p = f"p={pair.p:.3f}" if pair.p >= _LEAST_SHOWN else f"p<{_LEAST_SHOWN}"
    return f"-{pair.b} +{pair.c} {p}"


_RUN: Columns[target_runs.Compared] = {
    "precision": lambda row: row.run.precision,
    "run": lambda row: row.run.run,
}
FIGURES: Columns[target_runs.Compared] = {
    **_RUN,
    "top-1 (%)": lambda row: percent(row.num_top1 / row.run.num_positions, 2),
    "top-5 (%)": lambda row: percent(row.run.num_top5 / row.run.num_positions, 2),
    "KL to fp32 (x 1e-5)": lambda row: (
        f"{1e5 * row.run.kl_mean:,.2f} ± {1e5 * row.run.kl_error:,.2f}"
    ),
}
"""A run's own figures."""
PAIRED: Columns[target_runs.Compared] = {
    **_RUN,
    f"KL /\n{target_runs.EXACT_RUN}": lambda row: _ratio_cell(row.kl_ratio),
    f"against\n{target_runs.BASE_RUN}": lambda row: _mcnemar_cell(row.paired),
    f"against\n{target_runs.EXACT_RUN}": lambda row: _mcnemar_cell(row.paired_exact),
}
"""A run beside the others of its precision."""
