"""``demo/compare_targets.py``: one model on several targets, position by position over windows.

Runs made on another machine are joined by their lines (``--merge``).
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.targets.target_runs import (
    BASE_RUN,
    EXACT_RUN,
    VERSION,
    Compared,
    Placed,
    TargetRun,
    append_run,
    check_same,
    compare_runs,
    figures,
    latest,
    read_runs,
)
from tilewright.compiler.bench.json_lines import check_writable
from tilewright.compiler.commands.arguments import Parser, integer
from tilewright.compiler.devices import check_gpu
from tilewright.compiler.environment import environment
from tilewright.compiler.errors import ConfigError, allowed
from tilewright.compiler.precision import PrecisionConfig, load_precision
from tilewright.models import find_model

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.compiler.bench.accuracy import Predictions
    from tilewright.compiler.bench.record import Paired
    from tilewright.compiler.bench.windows import Window
    from tilewright.compiler.commands.source import Source
    from tilewright.compiler.driver import Compiled
    from tilewright.compiler.targets.base import Progress

TARGETS = ("cpu", "cuda", "reference")
_PRECISIONS = ("bf16", "accuracy", "performance")
_LEAST_SHOWN = 0.001


@dataclass(frozen=True, slots=True)
class Choice:
    """A target and its arithmetic, as ``cpu`` or ``cpu:exact``."""

    target: str
    compute: str


@dataclass(frozen=True, slots=True)
class Options:
    """A checked command line."""

    model: str | None
    precisions: tuple[PrecisionConfig, ...]
    choices: tuple[Choice, ...]
    num_windows: int
    batch: int
    threads: int | None
    out_path: Path | None
    merge_paths: tuple[Path, ...]


def parser() -> argparse.ArgumentParser:
    """The script's options."""
    found = Parser(
        prog="tilewright compare-targets",
        description="Compare targets with the fp32 reference and with each other, position by "
        "position: 512 teacher-forced predictions a window.",
    )
    found.add_argument("--model", metavar="PATH", help="as of tilewright run (default: smollm2)")
    found.add_argument("--precision", nargs="+", metavar="NAME", default=list(_PRECISIONS))
    found.add_argument(
        "--runs",
        nargs="+",
        metavar="TARGET[:exact]",
        default=[],
        help=f"of {', '.join(TARGETS)}; others are compared with {BASE_RUN} and {EXACT_RUN}",
    )
    found.add_argument("--windows", type=integer(1), default=8, help="default: 8")
    found.add_argument(
        "--batch", type=integer(1, 1024), default=1, help="windows run side by side (default: 1)"
    )
    found.add_argument("--threads", type=integer(1, 1024), help="CPU threads (default: all cores)")
    found.add_argument("--out", metavar="FILE", help="add a line for every run to this file")
    found.add_argument(
        "--merge", nargs="+", metavar="FILE", default=[], help="show the runs of these files too"
    )
    return found


def read_options(argv: Sequence[str]) -> Options:
    """The checked command line. Raises TilewrightError."""
    arguments = parser().parse_args(list(argv))
    choices = tuple(dict.fromkeys(_choice(text) for text in arguments.runs))
    if not choices and not arguments.merge:
        raise ConfigError("nothing to compare; allowed: --runs, --merge, or both")
    if any(choice.target == "cuda" for choice in choices):
        check_gpu()
    if arguments.out is not None:
        check_writable(arguments.out, "runs file")
        if not choices:
            raise ConfigError(f"--out {arguments.out} without --runs; allowed: both, or neither")
    return Options(
        model=arguments.model,
        precisions=tuple(load_precision(name) for name in dict.fromkeys(arguments.precision)),
        choices=choices,
        num_windows=arguments.windows,
        batch=min(arguments.batch, arguments.windows),
        threads=arguments.threads,
        out_path=None if arguments.out is None else Path(arguments.out),
        merge_paths=tuple(Path(name) for name in arguments.merge),
    )


def _choice(text: str) -> Choice:
    target, separator, compute = text.partition(":")
    if target not in TARGETS or (separator and compute != "exact"):
        names = [name for target in TARGETS for name in (target, f"{target}:exact")]
        raise ConfigError(f"--runs {text!r}; {allowed(names)}")
    return Choice(target, compute or "fast")


def main(argv: list[str]) -> int:
    """Read other runs, make ours, print the table; returns the exit code.

    Raises:
        TilewrightError: as every command.
    """
    options = read_options(argv)
    placed = [each for path in options.merge_paths for each in read_runs(path)]
    if options.choices:
        placed += _measure_all(options, placed)
    if not placed:
        raise ConfigError(f"{options.merge_paths[0]}: holds no run; allowed: one or more")
    first = placed[0]
    check_same(
        placed,
        model_hash=first.run.model_hash,
        text_hash=first.run.text_hash,
        what=first.place,
    )
    _print(compare_runs(latest(placed)))
    return 0


@dataclass(frozen=True, slots=True)
class _Work:
    """What all runs of ours share."""

    source: Source
    options: Options
    text_hash: str
    windows: Sequence[Window]


def _measure_all(options: Options, merged: Sequence[Placed]) -> list[Placed]:
    """Our own runs, one after another, each recorded when it is done."""
    from tilewright.compiler.commands.console import compile_progress, err

    screen, found = err(), []
    clock = _Clock(screen)
    with compile_progress(screen) as progress:
        work = _prepare(options, merged, progress)
        clock.tell("fp32 reference")
        for precision in options.precisions:
            for choice in options.choices:
                run = _measure(work, precision, choice=choice, progress=progress)
                found.append(Placed("a run made now", run))
                if options.out_path is not None:
                    append_run(options.out_path, run)
                clock.tell(f"{run.precision} on {run.run}")
    return found


class _Clock:
    """Says how long each thing took."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._started = time.perf_counter()

    def tell(self, what: str) -> None:
        """This has just been done, and nothing else since the last one."""
        now = time.perf_counter()
        self._screen.print(f"{what}: {now - self._started:.0f} s", style="dim")
        self._started = now


def _prepare(options: Options, merged: Sequence[Placed], progress: Progress) -> _Work:
    """The model, the windows, and the fp32 model on them.

    Raises:
        ConfigError: for runs to merge with that are of something else, before time is spent.
    """
    from tilewright.compiler.bench.windows import build_windows, cut_windows, windows_hash
    from tilewright.compiler.commands.measure import compile_reference, subject_of
    from tilewright.compiler.commands.source import open_source

    source = open_source(find_model(options.model))
    subject, _ = subject_of(source)
    tokens = cut_windows(source.tokenizer.encode, options.num_windows)
    text_hash = windows_hash(tokens)
    check_same(
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
) -> TargetRun:
    """Compile one precision for one target, and force all windows through it."""
    from tilewright.compiler.bench.cases import ACCURACY_CONTEXT
    from tilewright.compiler.bench.windows import force_windows
    from tilewright.compiler.commands.arguments import ModelOptions
    from tilewright.compiler.commands.source import compile_source
    from tilewright.compiler.targets.base import CompileOptions

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
    predictions = force_windows(
        compiled.executable,
        work.windows,
        batch=options.batch,
        on_step=lambda done, total: progress(choice.target, done, total),
    )
    run = _record(work, compiled, predictions)
    compiled.executable.close()
    return run


def _record(work: _Work, compiled: Compiled, predictions: Predictions) -> TargetRun:
    from tilewright.compiler.commands.measure import device_of

    fives = [five for window in work.windows for five in window.reference.guesses]
    values: dict[str, Any] = figures(predictions.guesses, fives, predictions.kl)
    values |= dataclasses.asdict(environment(hash_host=True))
    device, detail = device_of(compiled, work.options.threads)
    return TargetRun(
        version=VERSION,
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


def _print(rows: Sequence[Compared]) -> None:
    from tilewright.compiler.commands.console import out, print_table

    screen, first = out(), rows[0].run
    title = f"{first.model}: {first.num_windows} windows, {first.num_positions} positions"
    own = ("precision", "run", "top-1 (%)", "top-5 (%)", "KL to fp32 (x 1e-5)")
    print_table(screen, title, own, [figure_cells(row) for row in rows], numbers=True)
    paired = (
        "precision",
        "run",
        f"KL /\n{EXACT_RUN}",
        f"against\n{BASE_RUN}",
        f"against\n{EXACT_RUN}",
    )
    cells = [paired_cells(row) for row in rows]
    title = "paired: KL ratio ± 95 %; top-1 lost, won, McNemar's p"
    print_table(screen, title, paired, cells, numbers=True)
    for run in dict.fromkeys(f"{row.run.run}: {row.run.device_detail}" for row in rows):
        screen.print(run, style="dim")
    unlike = max(row.num_unlike for row in rows)
    if unlike:
        screen.print(
            f"the fp32 references differ at up to {unlike} positions; "
            f"top-1 is against that of {first.precision} on {first.run}"
        )


def figure_cells(row: Compared) -> tuple[str, ...]:
    """A run's own figures."""
    run = row.run
    return (
        run.precision,
        run.run,
        f"{100 * row.num_top1 / run.num_positions:.2f}",
        f"{100 * run.num_top5 / run.num_positions:.2f}",
        f"{1e5 * run.kl_mean:,.2f} ± {1e5 * run.kl_error:,.2f}",
    )


def paired_cells(row: Compared) -> tuple[str, ...]:
    """A run beside the others of its precision."""
    ratio = row.kl_ratio
    return (
        row.run.precision,
        row.run.run,
        "-" if ratio is None else f"{ratio.ratio:.3f} ± {ratio.half:.3f}",
        _mcnemar_cell(row.paired),
        _mcnemar_cell(row.paired_exact),
    )


def _mcnemar_cell(pair: Paired | None) -> str:
    if pair is None:
        return "-"
    p = f"p={pair.p:.3f}" if pair.p >= _LEAST_SHOWN else f"p<{_LEAST_SHOWN}"
    return f"-{pair.b} +{pair.c} {p}"
