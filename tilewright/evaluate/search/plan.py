"""A search's specification: goal, bounds, and the initial measurements.

Measures nothing. Equal measurements from a different sweep are reused.
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
from tilewright.evaluate.sweep.journal import Added, SweepJournal, SweepState, TrialFinished
from tilewright.evaluate.sweep.model import SweptModel
from tilewright.evaluate.sweep.plans import Measures, SweepConfig
from tilewright.evaluate.sweep.sensitivity import Sensitivity, sensitivities
from tilewright.evaluate.sweep.trial import Trial
from tilewright.utils.environment import environment

GUARD = 1.0
"""Standard errors that top-1 must exceed its bound by on the search text. Without a margin, the
cheapest configuration within a bound is often there by chance.
"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds for top-1 (percent), KL (nats) and the weights' size in the target's storage
    (bytes).
    """

    min_top1: float | None = None
    max_kl: float | None = None
    max_bytes: int | None = None

    @property
    def is_of_accuracy(self) -> bool:
        """Whether accuracy is bounded, so that the search maximizes speed."""
        return self.min_top1 is not None or self.max_kl is not None

    def keeps(self, accuracy: Accuracy, num_bytes: int, *, guard: float = 0.0) -> bool:
        """Return whether a measurement is within all bounds, with a margin of ``guard`` standard
        errors.

        An unknown divergence is out of bounds.
        """
        share, kl = accuracy.num_top1 / accuracy.num_positions, accuracy.kl_mean
        kl = None if kl is None else kl + guard * (accuracy.kl_error or 0.0)
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
    """A search's specification.

    Attributes:
        usual: Default measurements for a configuration.
        held_out: Text that confirms the result.
        takes_other_code: Also reuse accuracies measured with different code.
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
    calibration: str = ""

    def entries(
        self, precisions: Iterable[PrecisionConfig], *, is_timed: bool
    ) -> list[SweepConfig]:
        """Return the configurations to measure. All except the base are probes, without table
        rows.
        """
        return [
            SweepConfig(
                self.model, self.target, self.device, each, part, is_timed, self.calibration
            )
            for each in precisions
            for part in ("" if each is self.base else each.name,)
        ]

    def lowered(self, name: str, choices: Mapping[SweepUnit, Level]) -> PrecisionConfig:
        """Return the base configuration with different levels for some units."""
        return assign(
            self.base,
            choices,
            name=name,
            num_layers=self.model.num_layers,
            groups=self.model.places(),
            model_name=self.model.name,
        )

    def identity(self, precision: PrecisionConfig) -> tuple[str, str]:
        """Return the id and the calibration of a configuration's cells."""
        resolved = self.model.resolve(precision)
        return resolved.id, self.calibration if self.model.has_calibrated(resolved) else ""

    def parts(self) -> list[SweepUnit]:
        """Return all units: every group in every layer, and the LM head."""
        return [
            SweepUnit(group, layer)
            for group in self._groups()
            for layer in self.model.layers(group) or (None,)
        ]

    def uniform(self) -> dict[Level, PrecisionConfig]:
        """Return the configurations with the same level everywhere, by level."""
        return {
            level: self.lowered(
                f"all={level}", {SweepUnit(group): level for group in self._groups()}
            )
            for level in self.levels
        }

    def by_group(self) -> dict[tuple[str, Level], PrecisionConfig]:
        """Return the configurations with a single lowered group, by group and level."""
        return {
            (group, level): self.lowered(f"{group}={level}", {SweepUnit(group): level})
            for level in self.levels
            for group in self._groups()
        }

    def _groups(self) -> list[str]:
        return [group for group in self.model.groups() if group in PRODUCT_GROUPS]

    def first_cells(self, known: SweepJournal | None) -> list[Trial]:
        """Return the initial measurements: the base, every level everywhere, and every group.

        Raises:
            ConfigError: The known sensitivities are for a different model, target or base.
        """
        uniform = self.entries([self.base, *self.uniform().values()], is_timed=True)
        by_group = self.entries(self.by_group().values(), is_timed=False)
        found = plans.cells([*uniform, *by_group], self.usual)
        if known is not None:
            sensitivity_of(found[0].configuration, known.state)
            return found
        probes = plans.sensitivity_entries(
            self.model,
            self.target,
            self.device,
            base=self.base,
            level=self.levels[0],
            calibration=self.calibration,
        )
        # The first of equal cells remains: a sensitivity probe names its unit.
        return plans.unique([*plans.cells(probes, self.usual), *found])

    def fits(self, known: SweepJournal) -> bool:
        """Return whether a sweep has sensitivities for this model, target and base."""
        try:
            self.first_cells(known)
        except ConfigError:
            return False
        return True


def searched_place(
    model: SweptModel, target: str, devices: Sequence[str], base_name: str
) -> tuple[str, PrecisionConfig]:
    """Return the device and the base for a search.

    Raises:
        ConfigError: The target does not support the device, or no file can inherit the base.
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
    journal: SweepJournal, cells: Sequence[Trial], known: SweepState, *, takes_other_code: bool
) -> None:
    """Reuse accuracies that a different sweep measured in the same way with the same code.

    Speeds are not reused, because they are comparable within a round only.
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
    """Return a sweep's sensitivities to a base.

    Raises:
        ConfigError: The sweep has no such sensitivities.
    """
    for each in sensitivities(state):
        if each.base.cell.configuration == base:
            return each
    raise ConfigError(
        "the sensitivities are of another model, target, device, compute or base; allowed: "
        "--from a sweep of the same, or none"
    )
