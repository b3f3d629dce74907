"""Report on a fitted performance model, with errors on held-out and unused rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.boards_fit import fitting
from bench.boards_fit.programs import PUBLISHED
from bench.boards_fit.rows import PublishedRow
from tilewright.compiler.targets.tenstorrent.perf.constants import START, Constants
from tilewright.evaluate.report.display import percent
from tilewright.evaluate.report.table import Table

_BAR = 90
"""Percentage for error bars: held-out rows within a prediction's bar."""
_BOARDS = ("N150", "N300", "T3K", "TG")


@dataclass(frozen=True, slots=True)
class Residual:
    """A sample's time errors: in the fit, and with its model, family or board held out.

    A family has models with equal sizes.
    """

    sample: fitting.Sample
    fitted: float
    model: float
    family: float
    board: float


@dataclass(frozen=True, slots=True)
class Study:
    """An interpretation for the published configurations, with its fit.

    Attributes:
        decode: residuals for decode steps, judged rows first.
        galaxy: residuals for Galaxy's decode steps.
        alone: error without each model, fitted on judged rows only.
    """

    reading: str
    rows: tuple[PublishedRow, ...]
    constants: Constants
    decode: tuple[Residual, ...]
    galaxy: tuple[Residual, ...]
    prefill: tuple[Residual, ...]
    alone: tuple[float, ...]

    def bars(self) -> dict[str, tuple[float, float]]:
        """Return error bars for steps and prompts by kind.

        A bar covers nine of ten rows. ``short`` is of held-out models, the other kinds are of rows
        that are never fitted.
        """
        errors = {
            "short": (
                [each.model for each in self.decode],
                [each.model for each in self.prefill],
            )
        }
        for _, kinds, has_replicas, name in _UNSEEN:
            errors[name] = (
                _unseen_errors(self, "decode", kinds, has_replicas),
                _unseen_errors(self, "prefill", kinds, has_replicas),
            )
        return {name: (_bar(steps), _bar(prompts)) for name, (steps, prompts) in errors.items()}

    def rank(self) -> float:
        """Return Spearman's correlation for the predicted and published precision rows."""
        matches = [case.decode for case in self.rows if case.kind == "precision" and case.decode]
        predicted = [1 / sample.predict(self.constants) for sample in matches]
        return fitting.rank_correlation(predicted, [1 / sample.seconds for sample in matches])


def study_rows(reading: str, rows: Sequence[PublishedRow]) -> Study:
    """Fit a study, and fit again without each model, family and board in turn."""
    steps = [case.decode for case in rows if case.is_judged and case.decode]
    large = [case.decode for case in rows if case.is_galaxy and case.decode]
    prompts = [case.prefill for case in rows if case.is_judged and case.prefill]
    decode = fitting.fit([*steps, *large], fitting.DECODE_NAMES, START)
    constants = fitting.fit(prompts, fitting.PREFILL_NAMES, decode)
    residuals = _residuals([*steps, *large], fitting.DECODE_NAMES, constants)
    return Study(
        reading=reading,
        rows=tuple(rows),
        constants=constants,
        decode=residuals[: len(steps)],
        galaxy=residuals[len(steps) :],
        prefill=_residuals(prompts, fitting.PREFILL_NAMES, constants),
        alone=tuple(fitting.held_out(steps, fitting.DECODE_NAMES, _model)),
    )


def _residuals(
    samples: Sequence[fitting.Sample], names: Sequence[str], constants: Constants
) -> tuple[Residual, ...]:
    keys: tuple[Callable[[fitting.Sample], Hashable], ...] = (
        _model,
        lambda sample: PUBLISHED[sample.model],
        lambda sample: sample.device,
    )
    columns = [fitting.held_out(samples, names, key) for key in keys]
    return tuple(
        Residual(sample, sample.error(constants), *errors)
        for sample, *errors in zip(samples, *columns, strict=True)
    )


def _model(sample: fitting.Sample) -> str:
    return sample.model


def _bar(errors: Sequence[float]) -> float:
    logs = np.abs(np.log1p(errors))
    return float(np.expm1(np.percentile(logs, _BAR)))


def study_report(studies: Sequence[Study]) -> str:
    """Return the report. The first study is in use."""
    used = studies[0]
    parts = [
        "### Errors",
        _summary(used),
        "### What the published configurations are taken to be",
        _readings(studies),
        "### Constants",
        _constants(used.constants),
        "### Decode steps, one user, short prompts",
        _residual_table([*used.decode, *used.galaxy]),
        "### Precision rows",
        _predicted(used, "t/s/u", lambda case: case.kind == "precision", titled=True),
        "### Prompts of 128 tokens",
        _residual_table(used.prefill),
        "### Decode steps the fit has not seen",
        _predicted(used, "t/s/u", lambda case: not _is_fitted(case) and case.kind != "precision"),
        "### Prompts the fit has not seen",
        _predicted(used, "ms", lambda case: not case.is_judged),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _is_fitted(case: PublishedRow) -> bool:
    return case.is_judged or case.is_galaxy


def _summary(study: Study) -> str:
    rows: list[tuple[str, ...]] = []

    def add(what: str, left_out: str, errors: Sequence[float]) -> None:
        if len(errors):
            rows.append((what, left_out, str(len(errors)), *_median_worst(errors)))

    for what, residuals in (("decode step", study.decode), ("prompt (TTFT)", study.prefill)):
        for name, text in _LEFT_OUT.items():
            add(what, text, [getattr(each, name) for each in residuals])
        for board in _BOARDS:
            of_board = [each.board for each in residuals if each.sample.device == board]
            add(what, f"board {board}", of_board)
    add("decode step, no Galaxy", "model", study.alone)
    add("Galaxy's step", "model", [each.model for each in study.galaxy])
    add("Galaxy's step", "board TG", [each.board for each in study.galaxy])
    for name, kinds, dp, _ in _UNSEEN:
        for what, of in (("decode", "step"), ("prefill", "prompt")):
            add(f"{name}: {of}", "never fitted", _unseen_errors(study, what, kinds, dp))
    columns = ("figure", "left out", "rows", "median (%)", "worst (%)")
    text = Table.of(columns, rows).markdown()
    rank = f"Rank correlation of the precision rows' speeds: {study.rank():.3f}."
    bars = "; ".join(
        f"{name} {percent(step, 0)} % of t/s/u, {percent(prompt, 0)} % of TTFT"
        for name, (step, prompt) in study.bars().items()
    )
    return f"{text}\n{rank}\nError bars of predictions: {bars}."


_LEFT_OUT = {
    "fitted": "nothing (in the fit)",
    "model": "model",
    "family": "family of equal sizes",
    "board": "board",
}
_UNSEEN = (
    ("32 users", ("batch_32",), False, "batch"),
    ("long prompts", ("long_context",), False, "long"),
    ("replicas (DP)", ("performance", "accuracy"), True, "replicas"),
)


def _unseen_errors(
    study: Study, what: str, kinds: tuple[str, ...], has_replicas: bool
) -> list[float]:
    matches = [
        getattr(case, what)
        for case in study.rows
        if case.kind in kinds and (case.row.dp > 1) == has_replicas
    ]
    return [sample.error(study.constants) for sample in matches if sample is not None]


def _readings(studies: Sequence[Study]) -> str:
    rows = []
    for study in studies:
        decode = _median_worst([each.model for each in study.decode])
        family = _median_worst([each.family for each in study.decode])
        prefill = _median_worst([each.model for each in study.prefill])
        rows.append((study.reading, *decode, *family, *prefill))
    columns = ("reading", "step: median (%)", "worst (%)", "family: median", "worst")
    return Table.of((*columns, "TTFT: median", "TTFT: worst"), rows).markdown()


def _constants(constants: Constants) -> str:
    rows = []
    for field in dataclasses.fields(constants):
        value, start = getattr(constants, field.name), getattr(START, field.name)
        rows.append((field.name, f"{start:.4g}", f"{value:.4g}"))
    return Table.of(("constant", "start", "fitted"), rows).markdown()


def _residual_table(residuals: Iterable[Residual]) -> str:
    rows = []
    for each in residuals:
        sample = each.sample
        errors = (each.fitted, each.model, each.family, each.board)
        rows.append(
            (
                *(sample.model, sample.device, sample.source, f"{1e3 * sample.seconds:.2f}"),
                f"{1e3 * sample.seconds * (1 + each.fitted):.2f}",
                *(_percent(error) for error in errors),
            )
        )
    columns = ("model", "board", "section", "published (ms)", "fitted (ms)", "error (%)")
    return Table.of((*columns, "model out", "family out", "board out"), rows).markdown()


def _predicted(
    study: Study, unit: str, chosen: Callable[[PublishedRow], bool], *, titled: bool = False
) -> str:
    is_decode = unit == "t/s/u"
    rows = []
    for case in study.rows:
        sample = case.decode if is_decode else case.prefill
        if sample is None or not chosen(case):
            continue
        times = (sample.seconds, sample.predict(study.constants))
        cells = [f"{1 / t:.1f}" if is_decode else f"{1e3 * t:,.0f}" for t in times]
        what = _short_title(case.title) if titled or case.kind == "precision" else case.title
        error = _percent(sample.error(study.constants))
        rows.append((sample.model, case.device, what, *cells, error))
    columns = ("model", "board", "section", f"published ({unit})", f"predicted ({unit})")
    return Table.of((*columns, "error of time (%)"), rows).markdown()


def _short_title(heading: str) -> str:
    """Return the differing settings in a published precision row."""
    inner = heading.partition("{")[2].partition("}")[0]
    kept = [part for part in inner.split(", ") if part.split(":")[0] in _DIFFERING]
    return ", ".join(kept)


_DIFFERING = ("ff1_3", "ff2", "wo", "activation")


def _median_worst(errors: Sequence[float]) -> tuple[str, str]:
    sizes = 100 * np.abs(errors)
    return f"{np.median(sizes):.1f}", f"{np.max(sizes):.1f}"


def _percent(error: float) -> str:
    return f"{100 * error:+.1f}"
