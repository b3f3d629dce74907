"""``tilewright run``: a prompt's way from path to text, with its figures."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from compiler.bench.cases import CASES
from compiler.bench.results import append, dumps
from compiler.commands.options import RunOptions, read_options
from compiler.precision import PrecisionSummary, list_precisions

if TYPE_CHECKING:
    from rich.console import Console

    from compiler.bench.record import Result
    from compiler.bench.timing import Run
    from compiler.driver import Compiled
    from models.tokenizer import Tokenizer

EXIT_TEXTS_DIFFER = 1
_SHOWN_CHARACTERS = 160
"""Of each answer of a batch; a single user's is streamed whole."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = read_options(argv)
    if options is None:
        _print_list()
        return 0
    return run(options)


def run(options: RunOptions) -> int:
    """Load, compile, generate, measure, print and record."""
    warnings.filterwarnings("ignore", module="torch")
    from compiler.bench.timing import time_jobs
    from compiler.commands import measure
    from compiler.commands.console import compile_progress, err, out
    from compiler.commands.source import open_source, precision_of

    screen = err() if options.as_json else out()
    source = open_source(options.model.path)
    if options.explain:
        _explain(screen, precision_of(source, options.model.precision))
    plan = measure.plan_jobs(source, options)
    with compile_progress(err()) as progress:
        compiled = measure.compile_for(source, options, plan, progress)
    for note in compiled.notes:
        screen.print(note, style="dim")
    if options.explain:
        _explain_contract(screen, compiled)
        _explain_cost(screen, compiled, plan.context)
    printer = _TextPrinter(source.tokenizer, screen, options)
    runs = time_jobs(
        compiled.executable,
        plan.jobs,
        num_repeats=options.case.num_repeats,
        rotate=options.case.rotate_prompts,
        on_token=printer.hear,
    )
    printer.close(runs[0])
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


def _report(screen: Console, options: RunOptions, result: Result, runs: list[Run]) -> int:
    from compiler.commands.console import print_table, repeat_rows, result_rows

    title = f"{result.case}: {result.model} on {result.target}, {result.precision_name}"
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


class _TextPrinter:
    """Streams the answer of a single user; prints those of a batch when they are complete."""

    def __init__(self, tokenizer: Tokenizer, screen: Console, options: RunOptions) -> None:
        self._tokenizer = tokenizer
        self._screen = screen
        self._shown = options.case.is_natural
        self._streams = self._shown and options.case.batch_size == 1
        self._stream = tokenizer.stream()

    def hear(self, repeat: int, request: object, token: int) -> None:
        """One token of a measured run; only the first repeat's are shown."""
        if self._streams and repeat == 0:
            self._write(self._stream.push(token))

    def close(self, run: Run) -> None:
        """The first repeat is complete."""
        if self._streams:
            self._write(self._stream.flush() + "\n\n")
        elif self._shown:
            for user, output in enumerate(run.outputs):
                text = " ".join(self._tokenizer.decode(output).split())
                shown = (
                    text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ..."
                )
                self._write(f"[{user}] {shown}\n")

    def _write(self, text: str) -> None:
        self._screen.file.write(text)
        self._screen.file.flush()


def _explain(screen: Console, precision: PrecisionSummary) -> None:
    from compiler.commands.console import print_table

    title = f"precision {precision.name}"
    print_table(screen, title, ("where", "what", "is", "by"), precision.rows)
    screen.print(precision.heading)


def _explain_contract(screen: Console, compiled: Compiled) -> None:
    from compiler.commands.console import print_table

    entries = compiled.executable.contract.entries
    rows = [
        (entry.field, entry.layers, entry.requested, entry.meaning.status, entry.meaning.effective)
        for entry in entries
    ]
    columns = ("field", "layers", "asked", "status", "used")
    print_table(screen, "numeric contract of the target", columns, rows)


def _explain_cost(screen: Console, compiled: Compiled, context: int) -> None:
    from compiler.commands.console import print_table
    from compiler.ir.cost import step_costs

    costs = step_costs(compiled.graph(), num_tokens=1, context=context)
    rows = [
        (
            cost.group,
            ", ".join(cost.formats),
            f"{cost.num_weights / 1e6:,.2f}",
            f"{cost.weight_bytes / 1e6:,.2f}",
            f"{cost.flops / 1e6:,.1f}",
        )
        for cost in costs
    ]
    columns = ("group", "formats", "weights (M)", "read (MB)", "operations (M)")
    title = f"one decode step at a context of {context}"
    print_table(screen, title, columns, rows, numbers=True)


def _print_list() -> None:
    from compiler.commands.console import out, print_table

    cases = [(case.name, case.description) for case in CASES.values()]
    print_table(out(), "cases (--case)", ("name", "what it runs"), cases)
    precisions = [(name, text) for name, text in list_precisions().items()]
    print_table(out(), "configurations (--precision)", ("name", "what it is"), precisions)
