"""The search itself: measures levels, walks the path by bisection, confirms the winner.

It asks a runner for cells and gets their states; how they are run is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compiler.bench.record import Accuracy
from compiler.bench.sweep import found_yaml, plans
from compiler.bench.sweep.bounds import GUARD, Bounds
from compiler.bench.sweep.cell import Cell
from compiler.bench.sweep.cost_model import CostModel, fit
from compiler.bench.sweep.found import (
    Found,
    about_predictions,
    against,
    percent,
    top1_text,
)
from compiler.bench.sweep.journal import Added, Finished, Journal, SweepState
from compiler.bench.sweep.levels import PRODUCT_GROUPS, Level, Part, assign
from compiler.bench.sweep.model import SweptModel, total_bytes
from compiler.bench.sweep.parts import Held, make_items, single_parts
from compiler.bench.sweep.plans import Entry, Measures
from compiler.bench.sweep.runner import Runner
from compiler.bench.sweep.search import Candidate, Path, first_meeting, plan_path, within_bytes
from compiler.bench.sweep.sensitivity import Sensitivity, observations, sensitivities
from compiler.bench.sweep.summary import Row, later_rounds, rows
from compiler.errors import ConfigError
from compiler.plain_yaml import parse_yaml
from compiler.precision import PrecisionConfig, load_precision
from compiler.precision.fragment import as_map, read_fragment

_MAPS = ("precision", "fidelity", "layers")
_SAFER = (0.0, 0.08, 0.2, 0.4)
"""How much of what is left of the path the next try goes on where the held-out text says no."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is searched: a model on a target, from a base."""

    model: SweptModel
    target: str
    device: str
    base: PrecisionConfig

    def entry(self, precision: PrecisionConfig, *, is_timed: bool) -> Entry:
        """A configuration of it; all but the base are probes, which no table of models shows."""
        part = "" if precision is self.base else precision.name
        return Entry(self.model, self.target, self.device, precision, part, is_timed)

    def lowered(self, name: str, choices: Mapping[Part, Level]) -> PrecisionConfig:
        """The base with parts at other levels."""
        return assign(self.base, choices, name=name, num_layers=self.model.num_layers)

    def groups(self) -> list[str]:
        """Those whose levels are chosen."""
        return [group for group in self.model.groups() if group in PRODUCT_GROUPS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the search was asked; ``held_out``: the text that confirms what was found."""

    bounds: Bounds
    levels: tuple[Level, ...]
    rounds: int
    cases: tuple[str, ...] | None
    compute: str
    threads: int | None
    text: str | None
    held_out: str

    def measures(
        self, *, is_timed: bool = True, text: str | None = None, first_round: int = 0
    ) -> Measures:
        """Accuracy on a text, and speed too if wanted, in rounds numbered from ``first_round``."""
        cases = self.cases or (plans.SPEED_CASE, plans.ACCURACY_CASE)
        return Measures(
            cases=cases if is_timed else (plans.ACCURACY_CASE,),
            rounds=self.rounds,
            first_round=first_round,
            compute=self.compute,
            threads=self.threads,
            text=text or self.text,
        )


def subject(model: SweptModel, target: str, devices: Sequence[str], base_name: str) -> Subject:
    """The one place of a search. Raises ConfigError for a device the target does not run on."""
    base = load_precision(base_name)
    places = plans.entries([model], [target], devices, [base])
    return Subject(model, target, places[0].device, base)


def first_cells(subject: Subject, settings: Settings, known: Journal | None) -> list[Cell]:
    """What is measured whatever comes of it: the base, every level everywhere, every group."""
    uniform = [subject.entry(subject.base, is_timed=True)]
    uniform += [subject.entry(p, is_timed=True) for p in _uniform(subject, settings).values()]
    groups = [subject.entry(p, is_timed=False) for p in _of_groups(subject, settings).values()]
    found = plans.cells([*uniform, *groups], settings.measures())
    if known is None:
        probes = plans.sensitivity_entries(
            subject.model,
            subject.target,
            subject.device,
            base=subject.base,
            level=settings.levels[0],
        )
        found = [*plans.cells(probes, settings.measures()), *found]
    return list({cell.id: cell for cell in found}.values())


def hunt(subject: Subject, settings: Settings, runner: Runner, known: Journal | None) -> Found:
    """Run the whole search.

    Raises:
        ConfigError: where cells that it rests on have failed, or the sensitivities are of another
            model, target or base.
    """
    first = first_cells(subject, settings, known)
    if known is not None:
        _adopt(runner.journal, first, known.state)
    runner.measure(first)
    return _Hunt(subject, settings, runner, known).run()


def _adopt(journal: Journal, cells: Sequence[Cell], known: SweepState) -> None:
    """Take over accuracies that another sweep has measured the same way; speeds are never mixed."""
    for cell in cells:
        ours, theirs = journal.state.cells.get(cell.id), known.cells.get(cell.id)
        if cell.kind == "speed" or theirs is None or theirs.result is None:
            continue
        if ours is None or ours.is_open:
            journal.append(
                Added(cell),
                Finished(
                    cell=cell.id,
                    outcome="done",
                    seconds=theirs.seconds or 0.0,
                    result=theirs.result.to_dict(),
                ),
            )


def _uniform(subject: Subject, settings: Settings) -> dict[Level, PrecisionConfig]:
    return {
        level: subject.lowered(f"all={level}", {Part(group): level for group in subject.groups()})
        for level in settings.levels
    }


def _of_groups(subject: Subject, settings: Settings) -> dict[tuple[str, Level], PrecisionConfig]:
    return {
        (group, level): subject.lowered(f"{group}={level}", {Part(group): level})
        for level in settings.levels
        for group in subject.groups()
    }


class _Hunt:
    """The steps of one search, after its first cells have been measured."""

    def __init__(
        self, subject: Subject, settings: Settings, runner: Runner, known: Journal | None
    ) -> None:
        self.subject, self.settings, self.runner = subject, settings, runner
        self.base = self._row(subject.base)
        self.sensitivity = self._checked(known.state if known else runner.journal.state)
        timed = [*rows(runner.journal.state), *(rows(known.state) if known else [])]
        self.cost_model: CostModel = fit(observations(timed))
        self.path = self._path()
        self.base_bytes = total_bytes(self._held(subject.base))

    def run(self) -> Found:
        """Bisect, confirm, compare with the uniform configurations, write down."""
        found = Found()
        uniform = [self.subject.base, *_uniform(self.subject, self.settings).values()]
        found.comments.append(about_predictions(self.cost_model))
        start = self._cheapest_within()
        candidate = None if start is None else self._confirmed(start, found)
        names = {self._id(each) for each in uniform}
        timed = [*uniform]
        if candidate is not None:
            timed.append(self._named(candidate))
        self._measure(timed, is_timed=False, text=self.settings.held_out)
        # in rounds of their own: speeds are compared within a round, never across hours
        self._measure(timed, is_timed=True, first_round=self.settings.rounds)
        shown = [later_rounds(self._row(each), self.settings.rounds) for each in timed]
        found.shown = [(row, self._held_out(row), self._is_within(row)) for row in shown]
        if candidate is not None:
            winner = shown[-1]
            others = [row for row in shown[:-1] if row.cell.precision_id in names]
            comparison = against(winner, others, self._is_within)
            found.comments += comparison
            found.yaml = self._yaml(candidate, winner, comparison)
        return found

    def _path(self) -> Path:
        parts = single_parts(self.subject.model)
        losses = {}
        for key, precision in _of_groups(self.subject, self.settings).items():
            accuracy, base = self._row(precision).accuracy, self.base.accuracy
            assert accuracy is not None and base is not None
            losses[key] = (accuracy.kl_mean or 0.0) - (base.kl_mean or 0.0)
        uniform = _uniform(self.subject, self.settings)
        held: dict[Level | None, Held] = {None: self._held(self.subject.base)}
        for level, precision in uniform.items():
            held[level] = self._held(precision)
        self.items = make_items(parts, self.sensitivity, losses, held, self.cost_model)
        return plan_path(self.items, "ms" if self.settings.bounds.is_of_accuracy else "bytes")

    def _cheapest_within(self) -> int | None:
        """The fewest steps within the bounds, as far as the searched text tells."""
        last = len(self.path.steps)
        bounds = self.settings.bounds
        if not bounds.is_of_accuracy:
            assert bounds.max_bytes is not None
            return within_bytes(self.path, self.base_bytes, bounds.max_bytes)
        return first_meeting(0, last, self._meets)

    def _meets(self, num_steps: int) -> bool:
        precision = self._named(self.path.candidate(num_steps))
        self._measure([precision], is_timed=False)
        row = self._row(precision)
        assert row.accuracy is not None
        return self.settings.bounds.keeps(row.accuracy, row.num_bytes or 0, guard=GUARD)

    def _confirmed(self, start: int, found: Found) -> Candidate | None:
        """The first of ever safer candidates that the held-out text confirms."""
        left = len(self.path.steps) - start
        if not self.settings.bounds.is_of_accuracy:
            left = 0
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
                f"{precision.name}: {percent(held_out)} % on the held-out text, outside the "
                "bounds: a safer one was tried"
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

    def _row(self, precision: PrecisionConfig) -> Row:
        """A configuration's measurements; those the search rests on must have succeeded."""
        wanted = self._id(precision)
        for row in rows(self.runner.journal.state):
            if row.cell.precision_id == wanted:
                if row.accuracy is None:
                    raise ConfigError(
                        f"{self.runner.journal.path}: {row.name} has no accuracy "
                        f"({row.states[0].status}: {row.states[0].reason}); allowed: "
                        "tilewright sweep restart, then --resume"
                    )
                return row
        raise ConfigError(f"{self.runner.journal.path}: {precision.name} was not measured")

    def _id(self, precision: PrecisionConfig) -> str:
        return self.subject.model.resolve(precision).id

    def _held(self, precision: PrecisionConfig) -> dict[tuple[str, int | None, str], int]:
        resolved = self.subject.model.resolve(precision)
        return self.subject.model.held_bytes(resolved, self.subject.target, self.settings.compute)

    def _held_out(self, row: Row) -> Accuracy | None:
        return row.accuracies.get(self.settings.held_out)

    def _is_within(self, row: Row) -> bool:
        accuracies = [row.accuracy, self._held_out(row)]
        bounds = self.settings.bounds
        return all(a is None or bounds.keeps(a, row.num_bytes or 0) for a in accuracies)

    def _checked(self, state: SweepState) -> Sensitivity:
        wanted = self.base.cell.configuration
        for each in sensitivities(state):
            if each.base.cell.configuration == wanted:
                return each
        raise ConfigError(
            "the sensitivities are of another model, target, device, compute or base; allowed: "
            "--from a sweep of the same, or none"
        )

    def _yaml(self, candidate: Candidate, winner: Row, comments: Sequence[str]) -> str:
        """The winner's file; it must read back as what was measured."""
        levels = {part: option.level for part, option in candidate.choices.items()}
        text = found_yaml.render(
            self.subject.base,
            levels,
            description=f"found by a search for {self.settings.bounds} on {self.subject.target}",
            provenance=self._provenance(winner, comments),
            reason=self._reason,
        )
        fragment = read_fragment(
            {
                k: v
                for k, v in as_map(parse_yaml(text, "found"), where="found").items()
                if k in _MAPS
            },
            source="found",
        )
        base = self.subject.base
        read = PrecisionConfig("found", "", base.name, (*base.fragments, fragment))
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
        """What the search weighed for one part: the options it had."""
        item = next(each for each in self.items if each.part == part)
        options = (
            f"{option.level} costs KL {option.kl_lost:.1e}, saves {option.ms_saved:.3f} ms"
            for option in item.options
            if option.level is not None
        )
        return "; ".join(options)
