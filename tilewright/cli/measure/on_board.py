"""``tilewright bench`` on an absent board: emulated text and accuracy, predicted speed.

The emulator's time is never printed as the speed of a board.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilewright.cli.arguments.bench import RunOptions
from tilewright.cli.measure import measure
from tilewright.cli.measure.explain import (
    TextPrinter,
    explain_contract,
    explain_precision,
    print_memory_estimate,
)
from tilewright.cli.terminal import console
from tilewright.cli.terminal.notes import RANDOM_NOTE, only_fallbacks
from tilewright.compiler.driver import lower_model, resolve_precision
from tilewright.compiler.passes.dumps import dump_folder
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.table import get_target
from tilewright.compiler.targets.tenstorrent import BoardTarget
from tilewright.compiler.targets.tenstorrent.perf.model import Prediction, explain_time, predict
from tilewright.compiler.targets.tenstorrent.program.instructions import Matmul
from tilewright.compiler.targets.tenstorrent.program.memory_plan import plan_memory
from tilewright.compiler.targets.tenstorrent.program.text import program_text
from tilewright.errors import ConfigError
from tilewright.evaluate.cases.cases import ACCURACY_CONTEXT
from tilewright.evaluate.report.display import decimal, percent
from tilewright.evaluate.report.table import Table
from tilewright.evaluate.results.record import Result
from tilewright.evaluate.results.row import model_text
from tilewright.loading.source import ModelHandle, precision_of, precision_title
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.compiler.targets.interface.compiled import Compiled

_START_SECONDS, _MULTIPLIES_PER_SECOND = 30.0, 1.2e9
"""Rough seconds before the emulator's first token, and multiplies per second on two cores.

On shared cores, the short case of SmolLM2 on an n150 takes over twice the estimated time.
"""
_GROUPS = 32
"""Data-parallel groups of the largest box."""


def run_board(source: ModelHandle, options: RunOptions, screen: Console) -> int:
    """Predict a board's speed, emulate the case, print and record. Return the exit code."""
    _check(source, options)
    plan = measure.plan_jobs(source, options, max_groups=_GROUPS)
    if options.explain:
        explain_precision(screen, precision_of(source, options.model.precision))
    board = _Board(source, options, plan)  # raises if the board has too little memory
    if source.weights == "random":
        console.note(screen, RANDOM_NOTE.format(source.name))
    sizes: dict[str, Any] = {"batch": options.case.batch_size, "context": plan.context}
    if options.explain:
        print_memory_estimate(console.err(), source.model, options.model, **sizes)
    records = [board.predicted()] if board.num_generated > 1 else []
    if options.case.is_natural or options.case.token_accuracy:
        say_expected_time(board.num_emulated, options.case.precision)
        records.append(board.emulated(screen))
    if options.explain:
        explain_contract(screen, board.contract)
    if options.explain_time:
        parts = explain_time(board.prefill, board.decode, num_generated=board.num_generated)
        for title, columns, rows in parts:
            console.print_table(screen, title, Table.of(columns, rows), numbers=True)
    last = records[-1]
    title = f"{last.case}: {model_text(last)} on {last.device}, {last.precision_name}"
    rows = [row for record in records for row in _rows(record)]
    console.print_table(screen, title, Table.of(("", "figure"), rows), numbers=True)
    precision = precision_title(source, precision_of(source, options.model.precision))
    console.note(screen, f"{last.device_detail}; {precision}")
    # An emulated text has no values to record.
    kept = [each for each in records if each.kind == "predicted" or each.accuracy is not None]
    console.keep_results(screen, options, kept)
    return 0


def say_expected_time(num_multiplies: int, precision: str) -> None:
    """Print the expected minutes of emulation, and a shorter case's name."""
    seconds = _START_SECONDS + num_multiplies / _MULTIPLIES_PER_SECOND
    text = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    said = f"the board is emulated, multiply by multiply: about {text} on two cores "
    console.note(console.err(), f"{said}(the shortest answer: --case {precision}-short)")


def _check(source: ModelHandle, options: RunOptions) -> None:
    """Check that the emulator and the time model support the case.

    Raises:
        ConfigError: for replicas with more than a prediction, or for compared repeats.
    """
    case = options.case
    emulates = case.is_natural or case.token_accuracy
    if case.data_parallel > 1 and (emulates or source.manifest is not None):
        raise ConfigError(
            f"case {case.name!r} on a board with a prompt, accuracy or a compiled folder: one "
            "group is emulated; allowed: its prediction from a model, without them"
        )
    if case.rotate_prompts:
        raise ConfigError(
            f"case {case.name!r} on a board, which is emulated once; allowed: other cases, or "
            "--target cpu"
        )


class _Board:
    """A model on a board: its programs, and the records from them."""

    def __init__(self, source: ModelHandle, options: RunOptions, plan: measure.BenchPlan) -> None:
        self._source, self._options, self._plan = source, options, plan
        self._compiled: Compiled | None = None
        case = options.case
        name = options.model.target if source.manifest is None else source.manifest.target
        target = get_target(name)
        assert isinstance(target, BoardTarget)
        self._target = target
        if case.data_parallel == 1 and (source.manifest is not None or self._needs_executable):
            with console.compile_progress(console.err()) as progress:
                self._compiled, _ = measure.compile_for(source, options, plan, progress)
            graph = self._compiled.graph()
            summary = self._compiled.precision
        else:
            assert source.model is not None and options.model.precision is not None
            resolved = resolve_precision(source.model, options.model.precision)
            summary = resolved.summary(options.model.precision.name)
            graph, _ = lower_model(
                source.model, resolved, target.stages(), silent, dump_dir=options.model.dump_dir
            )
        self._precision = summary
        self._prompt_length = max(len(job.prompt) for job in plan.jobs)
        self.num_generated = max(job.sampling.max_tokens for job in plan.jobs)
        choices = CompileOptions(
            max_batch=case.batch_size, max_context=plan.context, compute=options.model.compute
        )
        self.contract = target.contract(graph, choices)
        self.prefill, self.decode = target.programs(
            graph, choices, length=self._prompt_length, num_groups=case.data_parallel
        )
        if (folder := dump_folder(options.model.dump_dir)) is not None:
            for program in (self.prefill, self.decode):
                path = folder / f"program_{program.phase}.txt"
                path.write_text(program_text(program), encoding="utf-8")

    @property
    def _needs_executable(self) -> bool:
        return self._options.case.is_natural or self._options.case.token_accuracy

    @property
    def num_emulated(self) -> int:
        """Return the multiplies by weights for prompts, answers and accuracy positions."""
        products = (each.weight for each in self.decode.instructions if isinstance(each, Matmul))
        num_weights = sum(weight.rows * weight.columns for weight in products)
        num_tokens = ACCURACY_CONTEXT if self._options.case.token_accuracy else 0
        if self._options.case.is_natural:
            num_tokens += sum(len(j.prompt) + j.sampling.max_tokens for j in self._plan.jobs)
        return num_tokens * num_weights * self.decode.mesh.num_chips

    def predicted(self) -> Result:
        """Return the record of the predicted speed."""
        found: Prediction = predict(
            self.prefill,
            self.decode,
            num_generated=self.num_generated,
            num_groups=self._options.case.data_parallel,
        )
        batch = self._options.case.batch_size
        return replace(
            self._record("predicted by the performance model"),
            kind="predicted",
            ttft_ms=found.ttft_ms,
            decode_tsu=found.decode_tsu,
            tps=found.decode_tsu * batch * self._options.case.data_parallel,
            ttft_error=found.ttft_error,
            decode_error=found.decode_error,
        )

    def emulated(self, screen: Console) -> Result:
        """Emulate the case: print the text, measure the accuracy, return the record."""
        compiled = self._compiled
        assert compiled is not None
        is_verbose = self._options.verbose or self._options.explain
        console.note(console.err(), *only_fallbacks(compiled.notes, is_verbose=is_verbose))
        if self._options.case.is_natural:
            self._print_text(screen, compiled)
        detail = compiled.executable.device_detail
        result = replace(self._record(detail or "emulated"), kind="emulated")
        if self._options.case.token_accuracy:
            with console.compile_progress(console.err()) as progress:
                accuracy = measure.measure_accuracy(
                    self._source, compiled, progress, text=self._options.accuracy_text
                )
            result = replace(result, accuracy=accuracy)
        compiled.executable.close()
        return result

    def _print_text(self, screen: Console, compiled: Compiled) -> None:
        jobs = self._plan.jobs
        printer = TextPrinter(
            self._source.tokenizer, screen, self._options, [job.prompt for job in jobs]
        )
        requests = [RequestState(user, job.prompt, job.sampling) for user, job in enumerate(jobs)]
        EngineLoop(compiled.executable).generate(
            requests, lambda request, token: printer.on_token(0, request, token)
        )
        printer.close([request.output for request in requests])

    def _record(self, detail: str) -> Result:
        memory = plan_memory(self.decode)
        num_chips = self.decode.mesh.num_chips * self._options.case.data_parallel
        return measure.describe(
            self._source,
            self._options,
            self._plan,
            self._precision,
            self.contract,
            device=self.decode.device,
            device_detail=detail,
            target=self._target.name,
            mesh=str(self.decode.mesh),
            num_generated=self.num_generated,
            resident_bytes=memory.weight_bytes * num_chips,
            cache_bytes=memory.cache_bytes * num_chips,
        )


def _rows(record: Result) -> list[tuple[str, str]]:
    """Return a record's values, with the kind in their names."""
    if record.kind == "emulated":
        return [
            (f"{name}, emulated", text) for name, text in console.accuracy_rows(record.accuracy)
        ]
    weights, cache = record.resident_bytes or 0, record.cache_bytes or 0
    return [
        ("TTFT (ms), predicted", _with_error(record.ttft_ms, record.ttft_error)),
        ("decode (t/s/u), predicted", _with_error(record.decode_tsu, record.decode_error)),
        ("all users (t/s), predicted", decimal(record.tps or 0, grouped=True)),
        ("weights, all chips (MB)", decimal(weights / 1e6, 0, grouped=True)),
        ("cache, all chips (MB)", decimal(cache / 1e6, 0, grouped=True)),
    ]


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    bar = "extrapolated: no model fitted is as small"
    bar = bar if error is None else f"error {percent(error, 0)} %"
    return f"{decimal(value, grouped=True)}  ({bar})"
