"""Runs a search: measures levels, bisects the path, and confirms the winner.

Requests cells from a runner, which runs them.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path as FilePath
from tempfile import TemporaryDirectory

from tilewright.compiler.precision import PrecisionConfig, load_precision
from tilewright.errors import ConfigError
from tilewright.evaluate.report.display import decimal
from tilewright.evaluate.results.record import Accuracy
from tilewright.evaluate.results.row import ResultRow
from tilewright.evaluate.search import found_yaml
from tilewright.evaluate.search.candidates import (
    Choices,
    StoredBytes,
    first_meeting,
    groups_without_shares,
    part_options,
    plan_path,
    within_bytes,
)
from tilewright.evaluate.search.levels import Level, SweepUnit
from tilewright.evaluate.search.plan import GUARD, SearchSpec, adopt, sensitivity_of
from tilewright.evaluate.search.report import (
    SearchResult,
    about_predictions,
    against,
    is_better,
    kl_text,
    top1_text,
)
from tilewright.evaluate.sweep import plans
from tilewright.evaluate.sweep.cost_model import Observation, fit
from tilewright.evaluate.sweep.journal import SweepJournal, SweepState
from tilewright.evaluate.sweep.runner import Runner
from tilewright.evaluate.sweep.sensitivity import observations
from tilewright.evaluate.sweep.summary import SweptRow, later_rounds, rows

_SAFER = (0.0, 0.08, 0.2, 0.4)
"""Shares of the rest of the path for further tries, if the held-out text fails."""


def hunt(search: SearchSpec, runner: Runner, known: SweepJournal | None) -> SearchResult:
    """Run a search from the first measurements to the confirmed configuration.

    Raises:
        ConfigError: if necessary cells failed, or if the sensitivities are of another model, target
            or base.
    """
    first = search.first_cells(known)
    if known is not None:
        adopt(runner.journal, first, known.state, takes_other_code=search.takes_other_code)
    runner.measure(first)
    return _Hunt(search, runner, known).run()


class _Hunt:
    """The steps of a search after its first cells."""

    def __init__(self, search: SearchSpec, runner: Runner, known: SweepJournal | None) -> None:
        self.search, self.bounds, self.runner = search, search.bounds, runner
        self.base = self._row(search.base)
        probed = known.state if known else runner.journal.state
        self.sensitivity = sensitivity_of(self.base.cell.configuration, probed)
        self.cost_model = fit(self._observations(known))
        self.remarks = [_about_sensitivities(known)] if known else []
        self.path = self._path()
        # Bytes grow with the steps.
        self.last = within_bytes(self.path, self.base.num_bytes or 0, self.bounds.max_bytes)

    def run(self) -> SearchResult:
        """Bisect, confirm, compare with the uniform configurations, and write the result."""
        found = SearchResult(comments=[about_predictions(self.cost_model), *self.remarks])
        num_steps = self._confirmed(found)
        tried = [self.search.base, *self.search.uniform().values()]
        if num_steps is not None:
            tried.append(self._named(num_steps))
        self._measure(tried, text=self.search.held_out)
        # New rounds, because speeds are compared within a round only.
        first_round = self.search.usual.rounds
        self._measure(tried, timed_from=first_round)
        known = [row for each in tried if (row := self._find(each)) is not None]
        shown = [later_rounds(row, first_round) for row in known]
        found.shown = [(row, self._held_out(row), self._is_within(row)) for row in shown]
        if num_steps is not None:
            self._judge(self.path[num_steps], shown[-1], shown[:-1], found)
        return found

    def _judge(
        self, choices: Choices, winner: SweptRow, uniform: Sequence[SweptRow], found: SearchResult
    ) -> None:
        """Write the winner with a comparison to every uniform configuration within the bounds."""
        others = [row for row in uniform if self._is_within(row)]
        better = next((row for row in others if self._is_better(row, winner)), None)
        comparison = against(winner, others)
        found.comments += comparison
        if better is not None:
            found.comments.append(f"{better.name} is better: nothing is gained by single layers")
        else:
            found.yaml, found.cell = self._yaml(choices, winner, comparison), winner.cell

    def _is_better(self, row: SweptRow, winner: SweptRow) -> bool:
        if self.bounds.is_of_accuracy:
            return is_better(row, winner)
        ours, theirs = row.accuracy, winner.accuracy  # within a size, accuracy decides
        assert ours is not None and theirs is not None
        return (ours.kl_mean or 0.0) < (theirs.kl_mean or 0.0)

    def _observations(self, known: SweepJournal | None) -> list[Observation]:
        """Return the first timings. Timings of another sweep are scaled by the base's speed."""
        state = self.runner.journal.state
        # Without the winner's rounds, so that a resumed search finds the same path.
        first = {k: s for k, s in state.cells.items() if s.cell.round < self.search.usual.rounds}
        ours = self._here(rows(SweepState(state.planned, first)))
        if known is None:
            return observations(ours)
        base_id = self.base.cell.precision_id
        theirs = self._here(rows(known.state))
        bases = [row.speed for row in (*ours, *theirs) if row.cell.precision_id == base_id]
        if len(bases) < 2 or bases[0] is None or bases[1] is None:
            return observations(ours)
        factor = bases[1] / bases[0]
        others = [row for row in theirs if row.cell.precision_id != base_id]
        scaled = [replace(each, ms=each.ms * factor) for each in observations(others)]
        return [*observations(ours), *scaled]

    def _here(self, found: Sequence[SweptRow]) -> list[SweptRow]:
        """Return this model's rows on this target."""
        return [row for row in found if row.cell.place == self.base.cell.place]

    def _path(self) -> list[Choices]:
        parts, base = self.search.parts(), self.base.accuracy
        losses = {}
        for (group, level), precision in self.search.by_group().items():
            row = self._find(precision)
            known = None if row is None or row.accuracy is None else row.accuracy.kl_mean
            if known is None or base is None or base.kl_mean is None:
                self.remarks.append(f"{precision.name} was not measured, and is left out")
            else:
                losses[group, level] = known - base.kl_mean
        if unshared := groups_without_shares(parts, self.sensitivity):
            names = ", ".join(unshared)
            self.remarks.append(f"not every layer of {names} was measured: equal shares are taken")
        stored: dict[Level | None, StoredBytes] = {None: self._stored_bytes(self.search.base)}
        stored |= {level: self._stored_bytes(each) for level, each in self.search.uniform().items()}
        self.options = part_options(parts, self.sensitivity, losses, stored, self.cost_model)
        return plan_path(self.options, "ms" if self.bounds.is_of_accuracy else "bytes")

    def _meets(self, num_steps: int) -> bool:
        precision = self._named(num_steps)
        self._measure([precision])
        row = self._row(precision)
        assert row.accuracy is not None
        return self.bounds.keeps(row.accuracy, row.num_bytes or 0, guard=GUARD)

    def _confirmed(self, found: SearchResult) -> int | None:
        """Return the first number of steps that the held-out text confirms, or None.

        The search starts with the fewest steps within the searched text's bounds, and
        continues with safer configurations.
        """
        start = self.last
        if start is not None and self.bounds.is_of_accuracy:
            start = first_meeting(0, start, self._meets)
        if start is None or self.last is None:
            return None
        for num_steps in dict.fromkeys(start + round(s * (self.last - start)) for s in _SAFER):
            precision = self._named(num_steps)
            self._measure([precision])
            self._measure([precision], text=self.search.held_out)
            row = self._row(precision)
            held_out = self._held_out(row)
            assert held_out is not None
            if self.bounds.keeps(held_out, row.num_bytes or 0):
                return num_steps
            top1 = decimal(ResultRow.of(accuracy=held_out).top1_percent)
            found.comments.append(
                f"{precision.name}: {top1} % on the "
                "held-out text, outside the bounds: a safer one was tried"
            )
        return None

    def _named(self, num_steps: int) -> PrecisionConfig:
        choices = self.path[num_steps].items()
        levels = {part: o.level for part, o in choices if o.level is not None}
        return self.search.lowered(f"step-{num_steps}", levels)

    def _measure(
        self,
        precisions: Sequence[PrecisionConfig],
        *,
        text: str | None = None,
        timed_from: int | None = None,
    ) -> None:
        """Measure accuracy on a text, and with ``timed_from`` also speed from that round on."""
        usual, is_timed = self.search.usual, timed_from is not None
        measures = replace(
            usual,
            cases=usual.cases if is_timed else (plans.ACCURACY_CASE,),
            text=text or usual.text,
            first_round=timed_from or 0,
        )
        wanted = plans.cells(self.search.entries(precisions, is_timed=is_timed), measures)
        # Cached, because the program runs again for another text or for speed.
        self.runner.measure([replace(cell, is_kept=True) for cell in wanted])

    def _find(self, precision: PrecisionConfig) -> SweptRow | None:
        """Return a configuration's measurements with a measured accuracy, or None."""
        wanted, calibration = self.search.identity(precision)
        state = self.runner.journal.state
        known = rows(state, wanted, calibration=calibration)
        return next((row for row in known if row.accuracy is not None), None)

    def _row(self, precision: PrecisionConfig) -> SweptRow:
        """Return a necessary configuration's measurements."""
        row = self._find(precision)
        if row is not None:
            return row
        wanted = self.search.identity(precision)
        of_it = [
            state
            for state in self.runner.journal.state.cells.values()
            if (state.cell.precision_id, state.cell.calibration) == wanted
            and state.cell.kind == "accuracy"
        ]
        why = f"{of_it[0].status}: {of_it[0].reason}" if of_it else "not planned"
        raise ConfigError(
            f"{self.runner.journal.path}: {precision.name} has no accuracy ({why}); allowed: "
            f"tilewright sweep restart {shlex.quote(str(self.runner.journal.path))} --failed, then "
            "--resume"
        )

    def _stored_bytes(self, precision: PrecisionConfig) -> StoredBytes:
        model, compute = self.search.model, self.search.usual.compute
        return model.stored_bytes(model.resolve(precision), self.search.target, compute)

    def _held_out(self, row: SweptRow) -> Accuracy | None:
        return row.accuracies.get(self.search.held_out)

    def _is_within(self, row: SweptRow) -> bool:
        known = [each for each in (row.accuracy, self._held_out(row)) if each is not None]
        return all(self.bounds.keeps(each, row.num_bytes or 0) for each in known)

    def _yaml(self, choices: Choices, winner: SweptRow, comments: Sequence[str]) -> str:
        """Return the winner's file. It must parse to the measured configuration."""
        levels = {part: option.level for part, option in choices.items()}
        text = found_yaml.render(
            self.search.base,
            levels,
            description=f"found by a search for {self.bounds} on {self.search.target}",
            provenance=self._provenance(winner, comments),
            reason=self._reason,
            group_reason=partial(_group_reason, choices),
        )
        with TemporaryDirectory(prefix="tilewright-") as folder:
            path = FilePath(folder) / "found.yaml"
            path.write_text(text, encoding="utf-8")
            read = load_precision(str(path))
        of_winner = winner.cell.precision_id, winner.cell.calibration
        assert self.search.identity(read) == of_winner, "the file means something else"
        return text

    def _provenance(self, winner: SweptRow, comments: Sequence[str]) -> list[str]:
        planned = self.runner.journal.state.planned
        accuracy, held_out = winner.accuracy, self._held_out(winner)
        assert accuracy is not None and held_out is not None
        return [
            f"Found by `tilewright sweep search` for {self.bounds}: "
            f"{winner.cell.model_name} ({winner.cell.model_hash[:12]}) on {self.search.target},",
            f"{planned.timestamp[:10]}, commit {planned.commit or 'unknown'}.",
            f"Measured: top-1 {top1_text(accuracy)} on the text of the search (required: "
            f"{GUARD:g} standard error above the bound),",
            f"{top1_text(held_out)} on the held-out text; KL {kl_text(accuracy)}; "
            f"{(winner.num_bytes or 0) / 1e6:.0f} MB of weights.",
            *([f"Calibrated: {calibrated}."] if (calibrated := winner.cell.calibration) else []),
            *comments,
            "KL of a part: its share of its group's measured loss. ms of a step: predicted.",
        ]

    def _reason(self, part: SweepUnit) -> str:
        """Return the cost and the saving of each option of a part."""
        options = (
            f"{option.level} costs KL {option.kl_lost:.1e}, saves {option.ms_saved:.3f} ms"
            for option in self.options[part]
            if option.level is not None
        )
        return "; ".join(options) + " (predicted)"


def _group_reason(choices: Choices, group: str) -> str:
    """Return a summary of the options for a group."""
    chosen = [option for part, option in choices.items() if part.group == group]
    lowered = [option for option in chosen if option.level is not None]
    return (
        f"{len(lowered)} of {len(chosen)} parts lowered, for KL "
        f"{sum(option.kl_lost for option in chosen):.1e} and "
        f"{sum(option.ms_saved for option in chosen):.2f} ms a step (predicted)"
    )


def _about_sensitivities(known: SweepJournal) -> str:
    """Return a line about the sensitivities' origin."""
    planned = known.state.planned
    return (
        f"Sensitivities and equal accuracies were taken from {known.path.name} "
        f"({planned.timestamp[:10]}, commit {planned.commit or 'unknown'})."
    )
