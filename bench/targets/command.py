"""``python -m bench compare-targets``: a model on several targets, paired position by position.

``--merge`` adds the runs in files from another machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.cli.terminal.console import compile_progress, err, out, print_table
from tilewright.compiler.devices import check_gpu
from tilewright.compiler.precision import PrecisionConfig, load_precision
from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.cases.cases import ACCURACY_CONTEXT
from tilewright.evaluate.report.display import percent
from tilewright.evaluate.report.table import Columns, Table
from tilewright.evaluate.results import target_runs
from tilewright.evaluate.results.record import Paired
from tilewright.evaluate.results.stats import Ratio
from tilewright.models import find_model
from tilewright.options.arguments import integer, option, parse
from tilewright.utils.environment import environment
from tilewright.utils.json_lines import Located, check_writable

if TYPE_CHECKING:
    from tilewright.compiler.targets.interface.base import Progress
    from tilewright.compiler.targets.interface.compiled import Compiled
    from tilewright.evaluate.measure.accuracy import Predictions, Truth
    from tilewright.loading.source import Source

TARGETS = ("cpu", "cuda", "reference")
_PRECISIONS = ("bf16", "accuracy", "performance")
_MIN_SHOWN = 0.001
_Runs = list[Located[target_runs.TargetRun]]


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
class _Options:
    model: str | None = option("a model (default: smollm2)", metavar="PATH")
    precision: tuple[PrecisionConfig, ...] = option(
        f"configurations (default: {' '.join(_PRECISIONS)})",
        default=tuple(map(load_precision, _PRECISIONS)),
        metavar="NAME",
        type=load_precision,
    )
    runs: tuple[Choice, ...] = option(
        f"{', '.join(TARGETS)}, compared with {target_runs.BASE_RUN} and {target_runs.EXACT_RUN}",
        default=(),
        metavar="TARGET[:exact]",
        type=_choice,
    )
    windows: int = option("windows with 512 predictions", default=8, type=integer(1))
    batch: int = option("windows in a batch", default=1, type=integer(1, 1024))
    threads: int | None = option("CPU threads (default: all cores)", type=integer(1, 1024))
    out: Path | None = option("append runs, as JSON lines", metavar="FILE", type=Path)
    merge: tuple[Path, ...] = option("show runs in files", default=(), metavar="FILE", type=Path)


def main(argv: list[str]) -> int:
    """Read recorded runs, measure new runs, and print both tables.

    Raises:
        TilewrightError: for bad arguments, or runs with another model or text.
    """
    words = "Compare targets with the fp32 reference and with each other, position by position."
    options = parse(_Options, argv, prog="python -m bench compare-targets", description=words)
    if not options.runs and not options.merge:
        raise ConfigError("nothing to compare; allowed: --runs, --merge, or both")
    if any(choice.target == "cuda" for choice in options.runs):
        check_gpu()
    if options.out is not None:
        check_writable(options.out, "runs file")
        if not options.runs:
            raise ConfigError(f"--out {options.out} without --runs; allowed: both, or neither")
    runs = [each for path in options.merge for each in target_runs.read_runs(path)]
    if options.runs:
        runs += _measure_all(options, runs)
    if not runs:
        raise ConfigError(f"{options.merge[0]}: holds no run; allowed: one or more")
    first = runs[0]
    hashes = {"model_hash": first.record.model_hash, "text_hash": first.record.text_hash}
    target_runs.check_same(runs, **hashes, what=first.place)
    _print(target_runs.compare_runs(target_runs.latest(runs)))
    return 0


def _measure_all(options: _Options, merged: _Runs) -> _Runs:
    """Measure all runs after each other. Each run is recorded at once."""
    from tilewright.cli.measure.measure import compile_reference, subject_of
    from tilewright.evaluate.cases.windows import build_windows, cut_windows, windows_hash
    from tilewright.loading.source import open_source

    source = open_source(find_model(options.model))
    subject, _ = subject_of(source)
    tokens = cut_windows(source.tokenizer.encode, options.windows)
    text_hash, found = windows_hash(tokens), list[Located[target_runs.TargetRun]]()
    hashes = {"model_hash": source.content_hash, "text_hash": text_hash}
    target_runs.check_same(merged, **hashes, what="what is to be run")
    with compile_progress(err()) as progress:
        reference = compile_reference(source.checkpoint_model(), progress)
        windows = build_windows(
            reference,
            subject,
            tokens,
            on_window=lambda done, total: progress("reference", done, total),
        )
        reference.close()
        for precision in {each.name: each for each in options.precision}.values():
            for choice in dict.fromkeys(options.runs):
                run = _measure(source, windows, options, (precision, choice), progress, text_hash)
                found.append(Located("a run made now", run))
                if options.out is not None:
                    target_runs.append_run(options.out, run)
                err().print(f"{run.precision} on {run.run}: measured", style="dim")
    return found


def _measure(
    source: Source,
    windows: Sequence[Truth],
    options: _Options,
    kind: tuple[PrecisionConfig, Choice],
    progress: Progress,
    text_hash: str,
) -> target_runs.TargetRun:
    """Compile a configuration for a target, and force all windows through the program."""
    from tilewright.compiler.targets.interface.base import CompileOptions
    from tilewright.evaluate.measure.accuracy import teacher_force
    from tilewright.loading.source import compile_source
    from tilewright.options.arguments import ModelOptions

    (precision, choice), batch = kind, min(options.batch, options.windows)
    sizes: dict[str, Any] = {"max_batch": batch, "max_context": ACCURACY_CONTEXT}
    compiled = compile_source(
        source,
        ModelOptions(source.path, choice.target, choice.compute, precision, None),
        CompileOptions(compute=choice.compute, num_threads=options.threads, **sizes),
        progress,
        use_cache=True,
    )
    predictions = teacher_force(
        compiled.executable,
        windows,
        batch=batch,
        on_step=lambda done, total: progress(choice.target, done, total),
    )
    run = _record(source, windows, compiled, predictions, (options.threads, batch, text_hash))
    compiled.executable.close()
    return run


def _record(
    source: Source,
    windows: Sequence[Truth],
    compiled: Compiled,
    predictions: Predictions,
    facts: tuple[int | None, int, str],
) -> target_runs.TargetRun:
    from tilewright.cli.measure.measure import device_of

    threads, batch, text_hash = facts
    fives = [five for reference, _ in windows for five in reference.guesses]
    values: dict[str, Any] = target_runs.figures(predictions.guesses, fives, predictions.kl)
    values |= dataclasses.asdict(environment(hash_host=True))
    device, detail = device_of(compiled, threads)
    return target_runs.TargetRun(
        version=target_runs.VERSION,
        model=source.name,
        model_hash=source.content_hash,
        text_hash=text_hash,
        num_windows=len(windows),
        precision=compiled.precision.name,
        precision_id=compiled.precision.id,
        heading=compiled.precision.heading,
        effective_id=compiled.executable.contract.effective_id,
        target=compiled.target,
        compute=compiled.compute,
        batch=batch,
        device=device,
        device_detail=detail,
        **values,
    )


def _print(rows: Sequence[target_runs.Compared]) -> None:
    first = rows[0].run
    title = f"{first.model}: {first.num_windows} windows, {first.num_positions} positions"
    print_table(out(), title, Table.by(FIGURES, rows), numbers=True)
    title = "paired: KL ratio ± 95 %; top-1 lost, won, McNemar's p"
    devices = dict.fromkeys(f"{row.run.run}: {row.run.device_detail}" for row in rows)
    print_table(out(), title, Table.by(PAIRED, rows, *devices), numbers=True)
    if unlike := max(row.num_unlike for row in rows):
        out().print(
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
    p = f"p={pair.p:.3f}" if pair.p >= _MIN_SHOWN else f"p<{_MIN_SHOWN}"
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
PAIRED: Columns[target_runs.Compared] = {
    **_RUN,
    f"KL /\n{target_runs.EXACT_RUN}": lambda row: _ratio_cell(row.kl_ratio),
    f"against\n{target_runs.BASE_RUN}": lambda row: _mcnemar_cell(row.paired),
    f"against\n{target_runs.EXACT_RUN}": lambda row: _mcnemar_cell(row.paired_exact),
}
