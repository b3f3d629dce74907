"""The search itself: measures levels, walks the path by bisection, confirms the winner.

It asks a runner for cells and gets their states; how they are run is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path as FilePath
from tempfile import TemporaryDirectory

from tilewright.compiler.bench.display import decimal
from tilewright.compiler.bench.record import Accuracy
from tilewright.compiler.bench.row import Row as Figures
from tilewright.compiler.errors import ConfigError
from tilewright.compiler.precision import PrecisionConfig, load_precision
from tilewright.compiler.sweep import found_yaml, plans
from tilewright.compiler.sweep.bounds import GUARD
from tilewright.compiler.sweep.cost_model import CostModel, Observation, fit
from tilewright.compiler.sweep.found import (
    Found,
    about_predictions,
    against,
    is_better,
    top1_text,
)
from tilewright.compiler.sweep.journal import Journal, SweepState
from tilewright.compiler.sweep.levels import Level, Part
from tilewright.compiler.sweep.parts import Held, groups_without_shares, make_items, single_parts
from tilewright.compiler.sweep.runner import Runner
from tilewright.compiler.sweep.search import Candidate, Path, first_meeting, plan_path, within_bytes
from tilewright.compiler.sweep.search_plan import (
    Settings,
    Subject,
    adopt,
    first_cells,
    group_precisions,
    sensitivity_of,
    uniform_precisions,
)
from tilewright.compiler.sweep.sensitivity import observations
from tilewright.compiler.sweep.summary import Row, later_rounds, rows

_SAFER = (0.0, 0.08, 0.2, 0.4)
"""How much of what is left of the path the next try goes on where the held-out text says no."""


def hunt(subject: Subject, settings: Settings, runner: Runner, known: Journal | None) -> Found:
    """Run the whole search.

    Raises:
        ConfigError: where cells that it rests on have failed, or the sensitivities are of another
            model, target or base.
    """
    first = first_cells(subject, settings, known)
    if known is not None:
        adopt(runner.journal, first, known.state, takes_other_code=settings.takes_other_code)
    runner.measure(first)
    return _Hunt(subject, settings, runner, known).run()


class _Hunt:
    """The steps of one search, after its first cells have been measured."""

    def __init__(
        self, subject: Subject, settings: Settings, runner: Runner, known: Journal | None
    ) -> None:
        self.subject, self.settings, self.runner = subject, settings, runner
        self.base = self._row(subject.base)
        probed = known.state if known else runner.journal.state
        self.sensitivity = sensitivity_of(self.base.cell.configuration, probed)
        self.cost_model: CostModel = fit(self._observations(known))
        self.remarks = [_about_sensitivities(known)] if known else []
        self.path = self._path()

    def run(self) -> Found:
        """Bisect, confirm, compare with the uniform configurations, write down."""
        found = Found(comments=[about_predictions(self.cost_model), *self.remarks])
        start = self._cheapest_within()
        candidate = None if start is None else self._confirmed(start, found)
        tried = [self.subject.base, *uniform_precisions(self.subject, self.settings).values()]
        if candidate is not None:
            tried.append(self._named(candidate))
        self._measure(tried, is_timed=False, text=self.settings.held_out)
        # in rounds of their own: speeds are compared within a round, never across hours
        self._measure(tried, is_timed=True, first_round=self.settings.usual.rounds)
        known = [row for each in tried if (row := self._find(each)) is not None]
        shown = [later_rounds(row, self.settings.usual.rounds) for row in known]
        found.shown = [(row, self._held_out(row), self._is_within(row)) for row in shown]
        if candidate is not None:
            self._judge(candidate, shown[-1], shown[:-1], found)
        return found

    def _judge(
        self, candidate: Candidate, winner: Row, uniform: Sequence[Row], found: Found
    ) -> None:
        """Write the winner down, beside every uniform configuration within the bounds."""
        others = [row for row in uniform if self._is_within(row)]
        better = next((row for row in others if self._is_better(row, winner)), None)
        comparison = against(winner, others)
        found.comments += comparison
        if better is not None:
            found.comments.append(f"{better.name} is better: nothing is gained by single layers")
        else:
            found.yaml = self._yaml(candidate, winner, comparison)

    def _is_better(self, row: Row, winner: Row) -> bool:
        if self.settings.bounds.is_of_accuracy:
            return is_better(row, winner)
        ours, theirs = row.accuracy, winner.accuracy  # within a size it is accuracy that counts
        assert ours is not None and theirs is not None
        return (ours.kl_mean or 0.0) < (theirs.kl_mean or 0.0)

    def _observations(self, known: Journal | None) -> list[Observation]:
        """What was timed first; of another sweep as it would be at this one's speed of the base."""
        state = self.runner.journal.state
        # the winner's rounds came later: without them a resumed search finds the same path
        first = {k: s for k, s in state.cells.items() if s.cell.round < self.settings.usual.rounds}
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

    def _here(self, found: Sequence[Row]) -> list[Row]:
        """Of this model on this target: another sweep may hold more."""
        return [row for row in found if row.cell.place == self.base.cell.place]

    def _path(self) -> Path:
        parts = single_parts(self.subject.model)
        base = self.base.accuracy
        losses = {}
        for (group, level), precision in group_precisions(self.subject, self.settings).items():
            row = self._find(precision)
            known = None if row is None or row.accuracy is None else row.accuracy.kl_mean
            if known is None or base is None or base.kl_mean is None:
                self.remarks.append(f"{precision.name} was not measured, and is left out")
            else:
                losses[group, level] = known - base.kl_mean
        if unshared := groups_without_shares(parts, self.sensitivity):
            names = ", ".join(unshared)
            self.remarks.append(f"not every layer of {names} was measured: equal shares are taken")
        uniform = uniform_precisions(self.subject, self.settings)
        held: dict[Level | None, Held] = {None: self._held(self.subject.base)}
        for level, precision in uniform.items():
            held[level] = self._held(precision)
        self.items = make_items(parts, self.sensitivity, losses, held, self.cost_model)
        return plan_path(self.items, "ms" if self.settings.bounds.is_of_accuracy else "bytes")

    def _cheapest_within(self) -> int | None:
        """The fewest steps within the bounds, as far as the searched text tells."""
        last = self._last_within_bytes()
        if last is None or not self.settings.bounds.is_of_accuracy:
            return last
        return first_meeting(0, last, self._meets)

    def _last_within_bytes(self) -> int | None:
        """The most steps that may be taken: the weights grow with them."""
        max_bytes = self.settings.bounds.max_bytes
        if max_bytes is None:
            return len(self.path.steps)
        return within_bytes(self.path, self.base.num_bytes or 0, max_bytes)

    def _meets(self, num_steps: int) -> bool:
        precision = self._named(self.path.candidate(num_steps))
        self._measure([precision], is_timed=False)
        row = self._row(precision)
        assert row.accuracy is not None
        return self.settings.bounds.keeps(row.accuracy, row.num_bytes or 0, guard=GUARD)

    def _confirmed(self, start: int, found: Found) -> Candidate | None:
        """The first of ever safer candidates that the held-out text confirms."""
        last = self._last_within_bytes()
        left = 0 if last is None else last - start
        tries = list(dict.fromkeys(start + round(share * left) for share in _SAFER))
        for num_steps in tries:
            candidate = self.path.candidate(num_steps)
            precision = self._named(candidate)
            self._measure([precision], is_timed=False)
            self._measure([precision], is_timed=False, text=self.settings.held_out)
            row = self._row(precision)
            held_out = self._held_out(row)
            assert held_out is not None
            if self.settings.bounds.keeps(held_out, row.num_bytes or 0):
                return candidate
            found.comments.append(
                f"{precision.name}: {decimal(Figures.of(accuracy=held_out).top1_percent)} % on the "
                "held-out text, outside the bounds: a safer one was tried"
            )
        return None

    def _named(self, candidate: Candidate) -> PrecisionConfig:
        return self.subject.lowered(f"step-{candidate.num_steps}", candidate.levels)

    def _measure(
        self,
        precisions: Sequence[PrecisionConfig],
        *,
        is_timed: bool,
        text: str | None = None,
        first_round: int = 0,
    ) -> None:
        entries = [self.subject.entry(each, is_timed=is_timed) for each in precisions]
        measures = self.settings.measures(is_timed=is_timed, text=text, first_round=first_round)
        wanted = plans.cells(entries, measures)
        # the same program is measured again: on another text, or for its speed
        self.runner.measure([replace(cell, is_kept=True) for cell in wanted])

    def _find(self, precision: PrecisionConfig) -> Row | None:
        """A configuration's measurements, where its accuracy is among them."""
        wanted = self._id(precision)
        found = (r for r in rows(self.runner.journal.state) if r.cell.precision_id == wanted)
        return next((row for row in found if row.accuracy is not None), None)

    def _row(self, precision: PrecisionConfig) -> Row:
        """Of a configuration that the search cannot do without."""
        row = self._find(precision)
        if row is not None:
            return row
        wanted = self._id(precision)
        of_it = [
            state
            for state in self.runner.journal.state.cells.values()
            if state.cell.precision_id == wanted and state.cell.kind == "accuracy"
        ]
        why = f"{of_it[0].status}: {of_it[0].reason}" if of_it else "not planned"
        raise ConfigError(
            f"{self.runner.journal.path}: {precision.name} has no accuracy ({why}); allowed: "
            "tilewright sweep restart, then --resume"
        )

    def _id(self, precision: PrecisionConfig) -> str:
        return self.subject.model.resolve(precision).id

    def _held(self, precision: PrecisionConfig) -> dict[tuple[str, int | None, str], int]:
        model, compute = self.subject.model, self.settings.usual.compute
        return model.held_bytes(model.resolve(precision), self.subject.target, compute)

    def _held_out(self, row: Row) -> Accuracy | None:
        return row.accuracies.get(self.settings.held_out)

    def _is_within(self, row: Row) -> bool:
        accuracies = [row.accuracy, self._held_out(row)]
        bounds = self.settings.bounds
        return all(a is None or bounds.keeps(a, row.num_bytes or 0) for a in accuracies)

    def _yaml(self, candidate: Candidate, winner: Row, comments: Sequence[str]) -> str:
        """The winner's file; it must read back as what was measured."""
        levels = {part: option.level for part, option in candidate.choices.items()}
        text = found_yaml.render(
            self.subject.base,
            levels,
            description=f"found by a search for {self.settings.bounds} on {self.subject.target}",
            provenance=self._provenance(winner, comments),
            reason=self._reason,
            group_reason=partial(self._group_reason, candidate),
        )
        with TemporaryDirectory(prefix="tilewright-") as folder:
            path = FilePath(folder) / "found.yaml"
            path.write_text(text, encoding="utf-8")
            read = load_precision(str(path))
        assert self._id(read) == winner.cell.precision_id, "the file means something else"
        return text

    def _provenance(self, winner: Row, comments: Sequence[str]) -> list[str]:
        planned = self.runner.journal.state.planned
        accuracy, held_out = winner.accuracy, self._held_out(winner)
        assert accuracy is not None and held_out is not None
        return [
            f"Found by `tilewright sweep search` for {self.settings.bounds}: "
            f"{winner.cell.model_name} ({winner.cell.model_hash[:12]}) on {self.subject.target},",
            f"{planned.timestamp[:10]}, commit {planned.commit or 'unknown'}.",
            f"Measured: top-1 {top1_text(accuracy)} on the text that was searched on (asked for "
            f"{GUARD:g} standard error above the bound there),",
            f"{top1_text(held_out)} on the held-out text; KL {accuracy.kl_mean or 0:.2e}; "
            f"{(winner.num_bytes or 0) / 1e6:.0f} MB of weights.",
            *comments,
            "KL of a part: its share of its group's measured loss. ms of a step: predicted.",
        ]

    def _reason(self, part: Part) -> str:
        """Why a part is an exception: what its options would have cost and saved."""
        item = next(each for each in self.items if each.part == part)
        options = (
            f"{option.level} costs KL {option.kl_lost:.1e}, saves {option.ms_saved:.3f} ms"
            for option in item.options
            if option.level is not None
        )
        return "; ".join(options) + " (predicted)"

    def _group_reason(self, candidate: Candidate, group: str) -> str:
        """What the choices for a group come to."""
        chosen = [option for part, option in candidate.choices.items() if part.group == group]
        lowered = [option for option in chosen if option.level is not None]
        return (
            f"{len(lowered)} of {len(chosen)} parts lowered, for KL "
            f"{sum(option.kl_lost for option in chosen):.1e} and "
            f"{sum(option.ms_saved for option in chosen):.2f} ms a step (predicted)"
        )


def _about_sensitivities(known: Journal) -> str:
    """Where what was not measured by the search comes from."""
    planned = known.state.planned
    return (
        f"Sensitivities and equal accuracies were taken from {known.path.name} "
        f"({planned.timestamp[:10]}, commit {planned.commit or 'unknown'})."
    )
