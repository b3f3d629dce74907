"""What a search is asked, what it must keep to, and what it measures before it can decide anything.

Nothing is measured here; what another sweep has measured the same way is taken over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilewright.compiler.precision import PrecisionConfig, list_precisions, load_precision
from tilewright.errors import ConfigError
from tilewright.evaluate.results.record import Accuracy
from tilewright.evaluate.search.levels import PRODUCT_GROUPS, Level, SweepUnit, assign
from tilewright.evaluate.sweep import plans
from tilewright.evaluate.sweep.cell import Cell
from tilewright.evaluate.sweep.journal import Added, SweepJournal, SweepState, TrialFinished
from tilewright.evaluate.sweep.model import SweptModel
from tilewright.evaluate.sweep.plans import Measures, SweepConfig
from tilewright.evaluate.sweep.sensitivity import Sensitivity, sensitivities
from tilewright.utils.environment import environment

GUARD = 1.0
"""Standard errors that top-1 keeps above its bound on the text that is searched on: the cheapest
of many configurations that just meet a bound has been lucky there."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Top-1 in percent, KL in nats, bytes of the weights as the target holds them."""

    min_top1: float | None = None
    max_kl: float | None = None
    max_bytes: int | None = None

    @property
    def is_of_accuracy(self) -> bool:
        """Whether accuracy is bounded, so that speed is what is looked for."""
        return self.min_top1 is not None or self.max_kl is not None

    def keeps(self, accuracy: Accuracy, num_bytes: int, *, guard: float = 0.0) -> bool:
        """Whether a measurement is within all bounds, top-1 by so many standard errors; an unknown
        divergence is within nothing.
        """
        share, kl = accuracy.num_top1 / accuracy.num_positions, accuracy.kl_mean
        error = guard * math.sqrt(share * (1 - share) / accuracy.num_positions)
        return (
            (self.min_top1 is None or 100 * (share - error) >= self.min_top1)
            and (self.max_kl is None or (kl is not None and kl <= self.max_kl))
            and (self.max_bytes is None or num_bytes <= self.max_bytes)
        )

    def __str__(self) -> str:
        parts = []
        if self.min_top1 is not None:
            parts.append(f"top-1 >= {self.min_top1:g} %")
        if self.max_kl is not None:
            parts.append(f"KL <= {self.max_kl:g}")
        if self.max_bytes is not None:
            parts.append(f"weights <= {self.max_bytes / 1e6:g} MB")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpec:
    """What is searched: a model on a target, from a base, for what.

    ``usual``: how configurations are measured unless the search says otherwise. ``held_out``: the
    text that confirms what was found. ``takes_other_code``: accuracies that other code has measured
    are taken over too.
    """

    model: SweptModel
    target: str
    device: str
    base: PrecisionConfig
    bounds: Bounds
    levels: tuple[Level, ...]
    usual: Measures
    held_out: str
    takes_other_code: bool = False

    def entries(
        self, precisions: Iterable[PrecisionConfig], *, is_timed: bool
    ) -> list[SweepConfig]:
        """List what is to be measured; all but the base are probes, in no table of models."""
        return [
            SweepConfig(self.model, self.target, self.device, each, part, is_timed)
            for each in precisions
            for part in ("" if each is self.base else each.name,)
        ]

    def lowered(self, name: str, choices: Mapping[SweepUnit, Level]) -> PrecisionConfig:
        """Make the base configuration with parts at other levels."""
        return assign(
            self.base,
            choices,
            name=name,
            num_layers=self.model.num_layers,
            groups=self.model.places(),
            model_name=self.model.name,
        )

    def parts(self) -> list[SweepUnit]:
        """Every group of every layer, and the head: what levels are chosen for."""
        return [
            SweepUnit(group, layer)
            for group in self._groups()
            for layer in self.model.layers(group) or (None,)
        ]

    def uniform(self) -> dict[Level, PrecisionConfig]:
        """The configurations that have one level everywhere, by level."""
        return {
            level: self.lowered(
                f"all={level}", {SweepUnit(group): level for group in self._groups()}
            )
            for level in self.levels
        }

    def by_group(self) -> dict[tuple[str, Level], PrecisionConfig]:
        """Make the configurations in which one group alone is lowered, by group and level."""
        return {
            (group, level): self.lowered(f"{group}={level}", {SweepUnit(group): level})
            for level in self.levels
            for group in self._groups()
        }

    def _groups(self) -> list[str]:
        return [group for group in self.model.groups() if group in PRODUCT_GROUPS]

    def first_cells(self, known: SweepJournal | None) -> list[Cell]:
        """What is measured whatever comes of it: the base, every level everywhere, every group.

        Raises:
            ConfigError: where the known sensitivities are of another model, target or base.
        """
        uniform = self.entries([self.base, *self.uniform().values()], is_timed=True)
        by_group = self.entries(self.by_group().values(), is_timed=False)
        found = plans.cells([*uniform, *by_group], self.usual)
        if known is not None:
            sensitivity_of(found[0].configuration, known.state)
            return found
        probes = plans.sensitivity_entries(
            self.model, self.target, self.device, base=self.base, level=self.levels[0]
        )
        # the first of equal ones stays: a sensitivity's probe says what it lowers
        return plans.unique([*plans.cells(probes, self.usual), *found])

    def fits(self, known: SweepJournal) -> bool:
        """Whether a sweep has sensitivities of this very model, target and base."""
        try:
            self.first_cells(known)
        except ConfigError:
            return False
        return True


def searched_place(
    model: SweptModel, target: str, devices: Sequence[str], base_name: str
) -> tuple[str, PrecisionConfig]:
    """The one device of a search, and its base.

    Raises:
        ConfigError: for a device the target does not run on, a base no file can inherit.
    """
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
    return plans.entries([model], [target], devices, [base])[0].device, base


def adopt(
    journal: SweepJournal, cells: Sequence[Cell], known: SweepState, *, takes_other_code: bool
) -> None:
    """Take over accuracies that another sweep has measured the same way, by the same code.

    Speeds are not taken over: they are compared within a round only.
    """
    now = environment()
    for cell in cells:
        ours, theirs = journal.state.cells.get(cell.id), known.cells.get(cell.id)
        if cell.kind == "speed" or theirs is None or theirs.result is None:
            continue
        if not takes_other_code and theirs.other_code(now):
            continue
        if ours is None or ours.is_open:
            end = TrialFinished(
                cell=cell.id,
                outcome="done",
                seconds=theirs.seconds or 0.0,
                result=theirs.result.to_dict(),
            )
            journal.append(Added(cell), end)


def sensitivity_of(base: tuple[str, ...], state: SweepState) -> Sensitivity:
    """Find a sweep's sensitivities to a base; raises ConfigError where there are none."""
    for each in sensitivities(state):
        if each.base.cell.configuration == base:
            return each
    raise ConfigError(
        "the sensitivities are of another model, target, device, compute or base; allowed: "
        "--from a sweep of the same, or none"
    )
