"""``tilewright run``: a prompt's way from path to text, with its figures."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright.compiler.bench.cases import CASES
from tilewright.compiler.bench.results import append, dumps
from tilewright.compiler.commands.options import RunOptions, read_options
from tilewright.compiler.errors import ConfigError
from tilewright.compiler.precision import list_precisions

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.compiler.bench.record import Result
    from tilewright.compiler.bench.timing import Run
    from tilewright.compiler.commands.source import Source
    from tilewright.compiler.driver import Compiled

EXIT_TEXTS_DIFFER = 1


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = read_options(argv)
    if options is None:
        _print_list()
        return 0
    return run(options)


def run(options: RunOptions) -> int:
    """Open the model; measure it, or emulate and predict where the target's device is not here."""
    warnings.filterwarnings("ignore", module="torch")
    from tilewright.compiler.commands import measure
    from tilewright.compiler.commands.console import err, out
    from tilewright.compiler.commands.source import open_source

    screen = err() if options.as_json else out()
    source = open_source(options.model.path)
    if measure.is_emulated(source, options):
        from tilewright.compiler.commands.board import run_board

        return run_board(source, options, screen)
    if options.explain_time:
        raise ConfigError(
            f"--explain-time with target {options.model.target}: there is a model of time of "
            "Tenstorrent boards alone; allowed: --target n150, n300, t3k or tg"
        )
    return _measure(source, options, screen)


def _measure(source: Source, options: RunOptions, screen: Console) -> int:
    """Compile, generate, measure, print and record."""
    from tilewright.compiler.bench.timing import time_jobs
    from tilewright.compiler.commands import measure
    from tilewright.compiler.commands.console import RANDOM_NOTE, compile_progress, err
    from tilewright.compiler.commands.screen import TextPrinter

    plan = measure.plan_jobs(source, options)
    if source.weights == "random":
        screen.print(RANDOM_NOTE.format(source.name), style="dim")
    measure.print_plan(err(), source, options, plan)
    with compile_progress(err()) as progress:
        compiled = measure.compile_for(source, options, plan, progress)
    for note in compiled.notes:
        screen.print(note, style="dim")
    if options.explain:
        _explain(screen, compiled, plan.context)
    printer = TextPrinter(source.tokenizer, screen, options)
    runs = time_jobs(
        compiled.executable,
        plan.jobs,
        num_repeats=options.case.num_repeats,
        rotate=options.case.rotate_prompts,
        on_token=printer.hear,
    )
    printer.close(runs[0].outputs)
    result = measure.make_result(
        source,
        options,
        compiled,
        runs,
        plan=plan,
        peak_memory=measure.peak_memory_bytes(),
        cache_bytes=measure.cache_bytes(compiled, plan),
    )
    if options.case.token_accuracy:
        with compile_progress(err()) as progress:
            accuracy = measure.measure_accuracy(
                source, compiled, progress, text=options.accuracy_text
            )
        result = replace(result, accuracy=accuracy)
    compiled.executable.close()
    return _report(screen, options, result, runs)


def _explain(screen: Console, compiled: Compiled, context: int) -> None:
    from tilewright.compiler.commands.screen import (
        explain_contract,
        explain_cost,
        explain_precision,
    )

    explain_precision(screen, compiled.precision)
    explain_contract(screen, compiled.executable.contract)
    explain_cost(screen, compiled, context)


def _report(screen: Console, options: RunOptions, result: Result, runs: list[Run]) -> int:
    from tilewright.compiler.commands.console import (
        model_title,
        print_table,
        repeat_rows,
        result_rows,
    )

    title = f"{result.case}: {model_title(result)} on {result.target}, {result.precision_name}"
    print_table(screen, title, ("", "median"), result_rows(result), numbers=True)
    if len(runs) > 1:
        columns = ("repeat", "TTFT (ms)", "prefill (t/s)", "decode (t/s/u)")
        print_table(screen, "", columns, repeat_rows(result.repeats), numbers=True)
    screen.print(f"{result.device_detail}; {result.heading}", style="dim")
    if options.results is not None:
        append(options.results, result)
        screen.print(f"recorded in {options.results}", style="dim")
    if options.as_json:
        print(dumps(result))
    if options.case.rotate_prompts:
        same = all(each.outputs == runs[0].outputs for each in runs[1:])
        screen.print(
            "every prompt gave the same text at every repeat"
            if same
            else "prompts gave different texts at different repeats",
            style="green" if same else "bold red",
        )
        return 0 if same else EXIT_TEXTS_DIFFER
    return 0


def _print_list() -> None:
    from tilewright.compiler.commands.console import out, print_table

    cases = [(case.name, case.description) for case in CASES.values()]
    print_table(out(), "cases (--case)", ("name", "what it runs"), cases)
    precisions = [(name, text) for name, text in list_precisions().items()]
    print_table(out(), "configurations (--precision)", ("name", "what it is"), precisions)
