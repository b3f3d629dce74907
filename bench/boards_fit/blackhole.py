"""The fit of Blackhole's time model: constants, left-out errors, error bars, report."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

import numpy as np

from bench.boards_fit import fitting
from bench.boards_fit.blackhole_rows import BlackholeSample, read_blackhole_samples
from tilewright.compiler.targets.tenstorrent.perf.blackhole import (
    BLACKHOLE_START,
    SOFTWARE,
    BlackholeConstants,
)
from tilewright.evaluate.report.table import Table

STEP_NAMES = ("cache_bytes_per_s", "ring_factor", *SOFTWARE)
PROMPT_NAMES = ("matmul_factor", "prompt_op_seconds")
_BAR = 90


@dataclass(frozen=True, slots=True)
class BlackholeStudy:
    """Rows, fitted constants, and left-out errors: the sample is not in its fit."""

    steps: tuple[BlackholeSample, ...]
    prompts: tuple[BlackholeSample, ...]
    constants: BlackholeConstants
    step_errors: tuple[float, ...]
    prompt_errors: tuple[float, ...]

    def bars(self) -> tuple[float, float]:
        """Return the errors that nine of ten left-out steps and prompts are within."""
        return _bar(self.step_errors), _bar(self.prompt_errors)


def study_blackhole() -> BlackholeStudy:
    """Fit all rows, and fit again without each sample."""
    rows = read_blackhole_samples()
    steps = [sample for sample in rows if sample.is_decode]
    counts = Counter(sample.software for sample in steps)
    judged = [
        sample for sample in steps if counts[sample.software] > 1
    ]  # a single sample is not left out
    prompts = [sample for sample in rows if not sample.is_decode]
    constants = fitting.fit(steps, STEP_NAMES, BLACKHOLE_START)
    constants = fitting.fit(prompts, PROMPT_NAMES, constants)
    return BlackholeStudy(
        tuple(judged),
        tuple(prompts),
        constants,
        tuple(_left_out(steps, judged)),
        tuple(fitting.held_out(prompts, PROMPT_NAMES, _identity, constants)),
    )


def _left_out(steps: list[BlackholeSample], judged: list[BlackholeSample]) -> list[float]:
    errors = fitting.held_out(steps, STEP_NAMES, _identity, BLACKHOLE_START)
    ids = {sample.id for sample in judged}
    return [error for sample, error in zip(steps, errors, strict=True) if sample.id in ids]


def _identity(sample: BlackholeSample) -> int:
    return sample.id


def _bar(errors: tuple[float, ...]) -> float:
    return float(np.expm1(np.percentile(np.abs(np.log1p(errors)), _BAR)))


def blackhole_report(study: BlackholeStudy) -> str:
    """Return tables of the errors and of all rows, as Markdown."""
    summary = []
    for name, errors in (("decode step", study.step_errors), ("prompt", study.prompt_errors)):
        sizes = 100 * np.abs(errors)
        cells = f"{np.median(sizes):.1f}", f"{np.max(sizes):.1f}"
        summary.append((name, str(len(errors)), *cells))
    rows = []
    for samples, errors in ((study.steps, study.step_errors), (study.prompts, study.prompt_errors)):
        for sample, error in zip(samples, errors, strict=True):
            what = "step" if sample.is_decode else "prompt"
            size = f"{sample.batch} x {sample.context:,}"
            times = f"{1e3 * sample.seconds:.2f}", f"{1e3 * sample.predict(study.constants):.2f}"
            software = sample.software if sample.is_decode else ""
            details = (what, size, sample.date, software, *times, f"{100 * error:+.1f}")
            rows.append((sample.model, sample.board, *details))
    columns = ("model", "board", "", "users x positions", "date", "software", "published (ms)")
    return "\n\n".join(
        [
            "### Blackhole: errors of left-out rows",
            Table.of(("", "rows", "median (%)", "worst (%)"), summary).markdown().rstrip("\n"),
            "### Blackhole: rows",
            Table.of((*columns, "fitted (ms)", "left-out error (%)"), rows).markdown(),
        ]
    )


def blackhole_source(study: BlackholeStudy) -> str:
    """Return the source lines of the constants and error bars."""
    lines = "".join(
        f"    {field.name}={getattr(study.constants, field.name):.4g},\n"
        for field in dataclasses.fields(study.constants)
    )
    steps, prompts = study.bars()
    bars = f"BLACKHOLE_BARS = ({steps:.3f}, {prompts:.3f})"
    # ruff writes exponents without a plus sign
    return f"BLACKHOLE = BlackholeConstants(\n{lines})\n{bars}\n".replace("e+", "e")
