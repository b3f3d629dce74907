"""Measures the rows of ``bench-cuda``: programs, timed runs and records.

Prints nothing.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from bench.cuda.rows import (
    DECODE,
    DECODE_SHARE,
    PREFILL_SECONDS,
    PREFILL_SHARE,
    TTFT,
    BenchRow,
)
from bench.random_files import write_folder
from tilewright.api import load
from tilewright.cli.arguments.bench import RunOptions, read_options
from tilewright.cli.measure import measure
from tilewright.compiler.ops.moe import expected_experts
from tilewright.compiler.targets.cuda.executable import CudaExecutable
from tilewright.compiler.targets.cuda.kernels.common.table import MADE_FOR, Gpu
from tilewright.compiler.targets.cuda.target import for_gpu
from tilewright.compiler.targets.interface.base import CompileOptions, Progress, Slot
from tilewright.compiler.targets.interface.compiled import Compiled
from tilewright.evaluate.cases.cases import CASES, TABLE_PROMPT_LENGTH
from tilewright.evaluate.measure.roofline import (
    StepTraffic,
    decode_work,
    limit_seconds,
    prefill_work,
)
from tilewright.evaluate.measure.timing import TimedRequest, TimedRun, time_jobs
from tilewright.evaluate.results.record import RANDOM_WEIGHTS, Ceilings, Result
from tilewright.loading.program import compile_program
from tilewright.loading.source import ModelHandle, source_of
from tilewright.models import FoundModel, load_model
from tilewright.runtime.engine import Engine

_LONG_PROMPT, _LONG_REPEATS = 16384, 3
"""Long prompt length, and the maximum number of repeats for long prompts."""


@runtime_checkable
class ChoosesExperts(Protocol):
    """An executable that counts the used experts of a decode step in each layer."""

    def chosen_experts(self, slots: Sequence[Slot], tokens: Sequence[int]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Figures:
    """A row's values in its metric's unit.

    Attributes:
        values: a value for each repeat.
        limit: bound from the device's measured rates.
        detail: other values in words.
        result: the record. None: another row has it.
    """

    row: BenchRow
    values: tuple[float, ...]
    limit: float | None = None
    detail: str = ""
    result: Result | None = None

    @property
    def value(self) -> float:
        """The median over all repeats."""
        return statistics.median(self.values)


class Bench:
    """A compiled program for rows with equal `BenchRow.program`. Close it before another."""

    def __init__(
        self,
        rows: Sequence[BenchRow],
        *,
        target: str,
        repeats: int,
        progress: Progress,
        num_ranks: int = 1,
    ) -> None:
        release_memory()  # after a failed program
        started = time.perf_counter()
        self._target, self._repeats, self._num_ranks = target, repeats, num_ranks
        self._context = rows[0].program[-1]
        model = self._options_of(rows[0]).model
        self._folder = tempfile.TemporaryDirectory()
        self.source = self._source(rows[0], model.path)
        batch = max(row.batch for row in rows)
        self.options = CompileOptions(max_batch=batch, max_context=self._context)
        self.compiled: Compiled = compile_program(self.source, model, self.options, progress)
        self.seconds_to_compile = time.perf_counter() - started
        self._measured: dict[tuple[int, int, int], tuple[Sequence[TimedRun], Result]] = {}

    def measure(self, row: BenchRow, ceilings: Ceilings) -> Figures:
        """Measure a row. Rows with equal batch and lengths share runs and record."""
        key = row.batch, row.prompt_length, row.num_generated
        is_known = key in self._measured
        if not is_known:
            self._measured[key] = self._run(row)
        runs, result = self._measured[key]
        values, limit, detail = _figure(row, runs, self.works(row), ceilings)
        # Files of random weights are checkpoints to the loader.
        kept = None if is_known else replace(result, ceilings=ceilings, weights="random")
        return Figures(row, values, limit, detail, kept)

    def works(self, row: BenchRow) -> tuple[StepTraffic, StepTraffic]:
        """Return the work for the prompt, and for a decode step at half the output."""
        context = row.prompt_length + (row.num_generated + 1) / 2
        return (
            prefill_work(self.compiled, num_tokens=row.prompt_length),
            decode_work(self.compiled, batch=row.batch, context=context),
        )

    def text(self) -> str:
        """Return a line with model, memory and compile time."""
        executable, options = self.compiled.executable, self.options
        weights = executable.memory().weights / 1e9
        cache = options.max_batch * executable.state_bytes(options.max_context) / 1e9
        return (
            f"{self.source.name} {RANDOM_WEIGHTS}, {self.compiled.precision.name}, for "
            f"{options.max_batch} x {options.max_context:,} positions: {weights:.1f} GB of "
            f"weights, {cache:.1f} GB of cache; made in {self.seconds_to_compile:.1f} s"
        )

    def use_kernels_of(self, capability: tuple[int, int]) -> None:
        """Run the next rows with the kernels of another compute capability."""
        gpu = Gpu(capability, MADE_FOR)
        executable = self.compiled.executable
        assert isinstance(executable, CudaExecutable)
        self.compiled = replace(self.compiled, executable=for_gpu(executable, gpu))
        self._measured.clear()

    def jobs(self, row: BenchRow) -> tuple[TimedRequest, ...]:
        """Return a row's prompts, with a prompt per user."""
        return measure.plan_jobs(self.source, self._options_of(row)).jobs

    def routing(self, row: BenchRow) -> str:
        """Return a line about a decode step's experts, empty for a dense model.

        The number and the bytes depend on the random weights and prompts.
        """
        executable = self.compiled.executable
        config = self.source.checkpoint_model().config
        count: int = getattr(config, "num_experts", 0)
        if not count or not isinstance(executable, ChoosesExperts):
            return ""
        prompts = [job.prompt for job in self.jobs(row)]
        ids, engine = range(len(prompts)), Engine(executable)
        logits = engine.prefill(ids, [torch.tensor(prompt) for prompt in prompts])
        tokens = logits.argmax(-1).tolist()
        found = executable.chosen_experts([engine.slot(index) for index in ids], tokens)
        engine.remove(ids)
        expected = expected_experts(count, row.batch, config.experts_per_token)  # type: ignore[attr-defined]
        return (
            f"experts chosen a layer in a decode step: {sum(found) / len(found):.1f} "
            f"({min(found)}-{max(found)}) of {count}; {expected:.1f} were all equally likely"
        )

    def _run(self, row: BenchRow) -> tuple[Sequence[TimedRun], Result]:
        options = self._options_of(row)
        plan = replace(measure.plan_jobs(self.source, options), context=self._context)
        runs = time_jobs(self.compiled.executable, plan.jobs, num_repeats=options.case.num_repeats)
        result = measure.make_result(self.source, options, self.compiled, runs, plan=plan)
        command = f"python -m bench bench-cuda --rows {row.name} --repeats {self._repeats}"
        command += f" --tensor-parallel {self._num_ranks}" if self._num_ranks > 1 else ""
        # The peak memory covers several programs in this process.
        return runs, replace(result, peak_memory_bytes=None, command=command)

    def _source(self, workload: BenchRow, path: FoundModel) -> ModelHandle:
        """Return a shape, or a written folder with its tokenizer."""
        if not workload.scheme:
            return load(path)
        folder = Path(self._folder.name, workload.model)
        write_folder(workload.shape, workload.scheme, folder)
        return source_of(load_model(folder, tokenizer=load_model(path).tokenizer), path)

    def _options_of(self, row: BenchRow) -> RunOptions:
        ranks = self._num_ranks
        return run_options(row, target=self._target, repeats=self._repeats, num_ranks=ranks)

    def close(self) -> None:
        """Release the program's memory."""
        self.compiled.executable.close()
        self._measured.clear()
        self._folder.cleanup()
        release_memory()


def release_memory() -> None:
    """Return unused memory to the GPU."""
    gc.collect()  # tensors in reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_options(row: BenchRow, *, target: str, repeats: int, num_ranks: int = 1) -> RunOptions:
    """Return the options of ``tilewright bench`` for a row.

    Raises:
        CheckpointError: for a shape without an architecture.
    """
    name = f"performance-long-context-{row.prompt_length // 1024}k"
    if row.prompt_length == TABLE_PROMPT_LENGTH:
        name = "performance-ci-32" if row.batch == 32 else "performance-ci-1"
    named = CASES[name if name in CASES else "performance-long-context-2k"]
    is_long = row.prompt_length >= _LONG_PROMPT
    case = replace(
        named,
        prompt_length=row.prompt_length,
        batch_size=row.batch,
        max_generated_tokens=row.num_generated,
        num_repeats=min(repeats, _LONG_REPEATS) if is_long else repeats,
    )
    argv = ["--model", f"shape:{row.shape}", "--target", target, "--precision", row.precision]
    argv += ["--tensor-parallel", str(num_ranks)] if num_ranks > 1 else []
    options = read_options(["--case", named.name, *argv, "--no-results", "--no-cache"])
    assert options is not None
    is_changed = replace(case, num_repeats=named.num_repeats) != named
    return replace(options, case=case, is_case_changed=is_changed)


def _figure(
    row: BenchRow,
    runs: Sequence[TimedRun],
    works: tuple[StepTraffic, StepTraffic],
    ceilings: Ceilings,
) -> tuple[tuple[float, ...], float, str]:
    """Return a row's values, limit and detail."""
    prompt_limit, step_limit = (limit_seconds(work, ceilings) for work in works)
    prompts = [1e-3 * run.repeat.ttft_ms for run in runs if run.repeat.ttft_ms]
    rates = [row.batch * run.repeat.decode_tsu for run in runs if run.repeat.decode_tsu]
    fastest = row.batch / step_limit
    decoding = f"decode {statistics.median(rates):,.1f} t/s of {fastest:,.1f}" if rates else ""
    seconds = statistics.median(prompts)
    prompting = f"prompt {1e3 * seconds:,.2f} ms, {row.prompt_length / seconds:,.0f} t/s"
    if row.metric == DECODE:
        return tuple(rates), fastest, prompting
    if row.metric == DECODE_SHARE:
        return tuple(100 * rate / fastest for rate in rates), 100.0, f"{decoding}; {prompting}"
    if row.metric == TTFT:
        return tuple(1e3 * each for each in prompts), 1e3 * prompt_limit, decoding
    if row.metric == PREFILL_SECONDS:
        return tuple(prompts), prompt_limit, decoding
    assert row.metric == PREFILL_SHARE
    shares = tuple(100 * works[0].flops / each / ceilings.flops_per_s for each in prompts)
    return shares, 100.0, f"{prompting}; {decoding}"
