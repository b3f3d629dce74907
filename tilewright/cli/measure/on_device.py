"""``tilewright bench`` on this machine's own devices: texts as they come, then measured figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright.cli.arguments.bench import RunOptions
from tilewright.cli.measure import measure
from tilewright.cli.measure.explain import (
    TextPrinter,
    explain_contract,
    explain_cost,
    explain_places,
    explain_precision,
    print_memory_estimate,
)
from tilewright.cli.terminal import console
from tilewright.cli.terminal.notes import RANDOM_NOTE, only_fallbacks
from tilewright.evaluate.measure.timing import TimedRun, time_jobs
from tilewright.evaluate.report.table import Table
from tilewright.evaluate.results.record import Result
from tilewright.evaluate.results.row import model_text
from tilewright.loading.draft import has_draft_layer
from tilewright.loading.program import settle_backend
from tilewright.loading.source import ModelHandle, precision_title

if TYPE_CHECKING:
    from rich.console import Console

EXIT_TEXTS_DIFFER = 1


def run_here(source: ModelHandle, options: RunOptions, screen: Console) -> int:
    """Compile, generate, measure, print and record. Returns the exit code."""
    case, plan = options.case, measure.plan_jobs(source, options)
    measure.check_drafts(source, options)
    if source.weights == "random":
        console.note(screen, RANDOM_NOTE.format(source.name))
    with console.compile_progress(console.err()) as progress:
        options = replace(options, model=settle_backend(options.model, progress))
    if options.explain:
        sizes = {"batch": case.batch_size, "context": plan.context}
        print_memory_estimate(console.err(), source.model, options.model, **sizes)
    with console.compile_progress(console.err()) as progress:
        compiled, draft = measure.compile_for(source, options, plan, progress)
    is_verbose = options.verbose or options.explain
    console.note(console.err(), *only_fallbacks(compiled.notes, is_verbose=is_verbose))
    if options.explain:
        has_layer = has_draft_layer(options.model)
        explain_precision(screen, compiled.precision, has_draft_layer=has_layer)
        explain_contract(screen, compiled.executable.contract)
        explain_places(screen, compiled)
        explain_cost(screen, compiled, plan.context)
    printer = TextPrinter(source.tokenizer, screen, options, [job.prompt for job in plan.jobs])
    runs = time_jobs(
        compiled.executable,
        plan.jobs,
        num_repeats=case.num_repeats,
        rotate=case.rotate_prompts,
        on_token=printer.on_token,
    )
    printer.close(runs[0].outputs)
    result = measure.make_result(source, options, compiled, runs, plan=plan, draft=draft)
    if case.token_accuracy:
        with console.compile_progress(console.err()) as progress:
            accuracy = measure.measure_accuracy(
                source, compiled, progress, text=options.accuracy_text
            )
        result = replace(result, accuracy=accuracy)
    compiled.executable.close()
    _print_result(screen, result, options, precision_title(source, compiled.precision))
    console.keep_results(screen, options, [result])
    return _compare_texts(screen, runs) if case.rotate_prompts else 0


def _print_result(screen: Console, result: Result, options: RunOptions, precision: str) -> None:
    title = f"{result.case}: {model_text(result)} on {result.target}, {result.precision_name}"
    console.print_table(
        screen, title, Table.of(("", "median"), console.result_rows(result)), numbers=True
    )
    if options.explain and len(result.repeats) > 1:
        repeats = Table.by(console.REPEAT_COLUMNS, enumerate(result.repeats, start=1))
        console.print_table(screen, "", repeats, numbers=True)
    console.note(screen, f"{result.device_detail}; {precision}")


def _compare_texts(screen: Console, runs: Sequence[TimedRun]) -> int:
    if all(each.outputs == runs[0].outputs for each in runs[1:]):
        screen.print("every prompt gave the same text at every repeat", style="green")
        return 0
    screen.print("prompts gave different texts at different repeats", style="bold red")
    return EXIT_TEXTS_DIFFER
