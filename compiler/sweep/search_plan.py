"""What a search is of, and what it measures before it can decide anything.

Nothing is measured here; what another sweep has measured the same way is taken over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.compiler.environment import environment
from tilewright.compiler.errors import ConfigError
from tilewright.compiler.precision import PrecisionConfig, list_precisions, load_precision
from tilewright.compiler.sweep import plans
from tilewright.compiler.sweep.bounds import Bounds
from tilewright.compiler.sweep.cell import Cell
from tilewright.compiler.sweep.code_version import is_of
from tilewright.compiler.sweep.journal import Added, Finished, Journal, SweepState
from tilewright.compiler.sweep.levels import PRODUCT_GROUPS, Level, Part, assign
from tilewright.compiler.sweep.model import SweptModel
from tilewright.compiler.sweep.plans import Entry, Measures
from tilewright.compiler.sweep.sensitivity import Sensitivity, sensitivities


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
        return assign(
            self.base,
            choices,
            name=name,
            num_layers=self.model.num_layers,
            groups=self.model.places(),
            model_name=self.model.name,
        )

    def groups(self) -> list[str]:
        """Those whose levels are chosen."""
        return [group for group in self.model.groups() if group in PRODUCT_GROUPS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the search was asked; ``usual``: how configurations are measured unless
    the search says otherwise. ``held_out``: the text that confirms what was found.
    ``takes_other_code``: accuracies that other code has measured are taken over too.
    """

    bounds: Bounds
    levels: tuple[Level, ...]
    usual: Measures
    held_out: str
    takes_other_code: bool = False

    def measures(
        self, *, is_timed: bool = True, text: str | None = None, first_round: int = 0
    ) -> Measures:
        """Accuracy on a text, and speed too if wanted, in rounds numbered from ``first_round``."""
        cases = self.usual.cases if is_timed else (plans.ACCURACY_CASE,)
        text = text or self.usual.text
        return replace(self.usual, cases=cases, text=text, first_round=first_round)


def subject(model: SweptModel, target: str, devices: Sequence[str], base_name: str) -> Subject:
    """The one place of a search. Raises ConfigError for a device the target does not run on."""
    base = load_precision(base_name)
    resolved = model.resolve(base)
    is_plain = not base.layers and all(
        resolved.settings.get(key) == value for key, value in base.precision.items()
    )
    if base_name not in list_precisions() or not is_plain:
        raise ConfigError(
            f"--base {base_name[:60]!r}: the file that is found inherits it; allowed in a search: "
            "a configuration of precision_cfgs/ that is the same in all layers"
        )
    places = plans.entries([model], [target], devices, [base])
    return Subject(model, target, places[0].device, base)


def first_cells(subject: Subject, settings: Settings, known: Journal | None) -> list[Cell]:
    """What is measured whatever comes of it: the base, every level everywhere, every group.

    Raises:
        ConfigError: where the known sensitivities are of another model, target or base.
    """
    uniform = [subject.entry(subject.base, is_timed=True)]
    uniform += [
        subject.entry(p, is_timed=True) for p in uniform_precisions(subject, settings).values()
    ]
    groups = [
        subject.entry(p, is_timed=False) for p in group_precisions(subject, settings).values()
    ]
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
    else:
        sensitivity_of(found[0].configuration, known.state)
    unique: dict[str, Cell] = {}
    for cell in found:  # the first of equal ones: a sensitivity's probe says what it lowers
        unique.setdefault(cell.id, cell)
    return list(unique.values())


def fits(subject: Subject, settings: Settings, known: Journal) -> bool:
    """Whether a sweep has sensitivities of this very subject."""
    try:
        first_cells(subject, settings, known)
    except ConfigError:
        return False
    return True


def adopt(
    journal: Journal, cells: Sequence[Cell], known: SweepState, *, takes_other_code: bool
) -> None:
    """Take over accuracies that another sweep has measured the same way, by the same code.

    Speeds are not taken over: they are compared within a round only.
    """
    now = environment()
    for cell in cells:
        ours, theirs = journal.state.cells.get(cell.id), known.cells.get(cell.id)
        if cell.kind == "speed" or theirs is None or theirs.result is None:
            continue
        if not (takes_other_code or is_of(theirs.result, now)):
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


def uniform_precisions(subject: Subject, settings: Settings) -> dict[Level, PrecisionConfig]:
    return {
        level: subject.lowered(f"all={level}", {Part(group): level for group in subject.groups()})
        for level in settings.levels
    }


def group_precisions(
    subject: Subject, settings: Settings
) -> dict[tuple[str, Level], PrecisionConfig]:
    return {
        (group, level): subject.lowered(f"{group}={level}", {Part(group): level})
        for level in settings.levels
        for group in subject.groups()
    }


def sensitivity_of(base: tuple[str, ...], state: SweepState) -> Sensitivity:
    """Beside this configuration."""
    for each in sensitivities(state):
        if each.base.cell.configuration == base:
            return each
    raise ConfigError(
        "the sensitivities are of another model, target, device, compute or base; allowed: "
        "--from a sweep of the same, or none"
    )
