"""Fit for Wormhole's time model: constants, left-out errors, error bars, report."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.boards_fit import fitting
from bench.boards_fit.wormhole import PUBLISHED, PublishedRow
from tilewright.compiler.targets.tenstorrent.perf.constants import START, Constants
from tilewright.evaluate.report.table import Table

_BAR = 90
"""Percent of left-out rows within the error bar."""
_UNSEEN = {
    "batch": (("batch_32",), False),
    "long": (("long_context",), False),
    "replicas": (("performance", "accuracy"), True),
}
"""Rows outside the fit: their sections, and whether they have replicas."""


@dataclass(frozen=True, slots=True)
class Residual:
    """Errors for a sample: in the fit, and without its model, its family or its board.

    A family has models with equal sizes.
    """

    sample: fitting.Sample
    fitted: float
    model: float
    family: float
    board: float


@dataclass(frozen=True, slots=True)
class Study:
    """Fitted constants with their residuals. Decode rows exclude those of Galaxy."""

    rows: tuple[PublishedRow, ...]
    constants: Constants
    decode: tuple[Residual, ...]
    galaxy: tuple[Residual, ...]
    prefill: tuple[Residual, ...]

    def bars(self) -> dict[str, tuple[float, float]]:
        """Return the error bars for steps and prompts, by run.

        ``short`` has left-out models. All further runs are outside the fit.
        """
        short = [[each.model for each in rows] for rows in (self.decode, self.prefill)]
        found = {"short": short}
        for name in _UNSEEN:
            found[name] = [self.unseen_errors(name, phase) for phase in ("decode", "prefill")]
        return {
            name: (error_bar(steps), error_bar(prompts)) for name, (steps, prompts) in found.items()
        }

    def unseen_errors(self, name: str, phase: str) -> list[float]:
        """Return the errors for rows outside the fit."""
        kinds, has_replicas = _UNSEEN[name]
        samples = [
            getattr(case, phase)
            for case in self.rows
            if case.kind in kinds and (case.num_replicas > 1) == has_replicas
        ]
        return [sample.error(self.constants) for sample in samples if sample is not None]

    def rank(self) -> float:
        """Return Spearman's correlation for precision rows: predicted and published speeds."""
        rows = [case.decode for case in self.rows if case.kind == "precision" and case.decode]
        predicted = [1 / sample.predict(self.constants) for sample in rows]
        return fitting.rank_correlation(predicted, [1 / sample.seconds for sample in rows])


def study_rows(rows: Sequence[PublishedRow]) -> Study:
    """Fit, and fit again without each model, family and board."""
    steps = [case.decode for case in rows if case.is_judged and case.decode]
    large = [case.decode for case in rows if case.is_galaxy and case.decode]
    prompts = [case.prefill for case in rows if case.is_judged and case.prefill]
    decode = fitting.fit([*steps, *large], fitting.DECODE_NAMES, START)
    constants = fitting.fit(prompts, fitting.PREFILL_NAMES, decode)
    residuals = _residuals([*steps, *large], fitting.DECODE_NAMES, constants)
    return Study(
        rows=tuple(rows),
        constants=constants,
        decode=residuals[: len(steps)],
        galaxy=residuals[len(steps) :],
        prefill=_residuals(prompts, fitting.PREFILL_NAMES, constants),
    )


def _residuals(
    samples: Sequence[fitting.Sample], names: Sequence[str], constants: Constants
) -> tuple[Residual, ...]:
    keys: tuple[Callable[[fitting.Sample], Hashable], ...] = (
        lambda sample: sample.model,
        lambda sample: PUBLISHED[sample.model],
        lambda sample: sample.device,
    )
    columns = [fitting.held_out(samples, names, key) for key in keys]
    return tuple(
        Residual(sample, sample.error(constants), *errors)
        for sample, *errors in zip(samples, *columns, strict=True)
    )


def error_bar(errors: Sequence[float]) -> float:
    """Return the error that nine of ten errors are within."""
    return float(np.expm1(np.percentile(np.abs(np.log1p(errors)), _BAR)))


def study_report(study: Study) -> str:
    """Return errors and rows as Markdown."""
    summary = []
    phases = {"decode step": study.decode, "Galaxy's step": study.galaxy, "prompt": study.prefill}
    for what, residuals in phases.items():
        for name in ("fitted", "model", "family", "board"):
            errors = [getattr(each, name) for each in residuals]
            summary.append(summarize(what, "nothing" if name == "fitted" else name, errors))
    for name in _UNSEEN:
        for phase in ("decode", "prefill"):
            errors = study.unseen_errors(name, phase)
            summary.append(summarize(f"{name}: {phase}", "all rows", errors))
    rows = [
        (
            *(each.sample.model, each.sample.device, each.sample.source),
            *(f"{1e3 * each.sample.seconds * size:.2f}" for size in (1, 1 + each.fitted)),
            *percents(each.fitted, each.model, each.family, each.board),
        )
        for each in (*study.decode, *study.galaxy, *study.prefill)
    ]
    columns = ("model", "board", "section", "published (ms)", "fitted (ms)", "error (%)")
    return "\n\n".join(
        [
            "### Wormhole",
            markdown(("figure", "left out", "rows", "median (%)", "worst (%)"), summary),
            f"Rank correlation of the precision rows' speeds: {study.rank():.3f}.",
            markdown((*columns, "model out", "family out", "board out"), rows),
        ]
    )


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return columns and lines as Markdown."""
    return Table.of(columns, lines).markdown()


def summarize(what: str, left_out: str, errors: Sequence[float]) -> tuple[str, ...]:
    """Return count, median and maximum."""
    sizes = 100 * np.abs(errors)
    return what, left_out, str(len(errors)), f"{np.median(sizes):.1f}", f"{np.max(sizes):.1f}"


def percents(*errors: float) -> list[str]:
    """Return errors in percent."""
    return [f"{100 * error:+.1f}" for error in errors]
