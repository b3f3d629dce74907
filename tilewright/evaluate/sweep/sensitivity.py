"""Sensitivities: each part's accuracy loss at a lower level, and its saved bytes and time.

Groups are timed. A single layer's time is below the noise, and a cost model predicts it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.errors import ConfigError
from tilewright.evaluate.results import stats
from tilewright.evaluate.results.record import Accuracy, Paired
from tilewright.evaluate.sweep.cost_model import CostModel, Observation, fit
from tilewright.evaluate.sweep.journal import SweepState
from tilewright.evaluate.sweep.summary import SweptRow, common_rounds, rows


@dataclass(frozen=True, slots=True)
class Saved:
    """Mean ms per decode step over rounds, with a 95 % interval from three rounds on."""

    ms: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Lowered:
    """A part at the lower level, compared with the base.

    Attributes:
        part: ``ff2``, ``12.ff2``, or `plans.ALL`.
        precision: configuration name.
        kl_lost: KL divergence added, in nats.
        kl_error: standard error of ``kl_lost``.
        top1_lost: percentage points.
        paired: McNemar's comparison.
        bytes_saved: weight bytes, negative for an increase.
        measured: measured saving per decode step, for groups.
        predicted: predicted saving per decode step in ms, for layers.
        is_same: whether the target has the same effective values as for the base.
    """

    part: str
    precision: str
    kl_lost: float
    kl_error: float
    top1_lost: float
    paired: Paired | None
    bytes_saved: int
    measured: Saved | None
    predicted: float | None
    is_same: bool

    @property
    def layer(self) -> int | None:
        """The part's layer, or None for a group."""
        layer, dot, _ = self.part.partition(".")
        return int(layer) if dot and layer.isdecimal() and layer.isascii() else None

    @property
    def group(self) -> str:
        """The part's tensor group, without its layer."""
        return self.part.rpartition(".")[2]

    @property
    def is_clear(self) -> bool:
        """Return whether the added divergence is above the noise."""
        return self.kl_lost > stats.Z_95 * self.kl_error

    @property
    def kl_per_mb(self) -> float | None:
        """The nats of KL lost per 10^6 bytes saved."""
        return self.kl_lost / self.bytes_saved * 1e6 if self.bytes_saved > 0 else None

    @property
    def kl_per_ms(self) -> float | None:
        """The nats of KL lost per ms saved, measured or predicted."""
        saved = self.measured.ms if self.measured else self.predicted
        return self.kl_lost / saved if saved is not None and saved > 0 else None


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """A model on a target: the base, its parts, and the cost model if it could be fitted."""

    base: SweptRow
    parts: tuple[Lowered, ...]
    cost_model: CostModel | None

    def find(self, part: str) -> Lowered | None:
        """Return the part with this name, or None."""
        return next((each for each in self.parts if each.part == part), None)

    @property
    def groups(self) -> list[Lowered]:
        """The parts of a whole group, or of all groups."""
        return [each for each in self.parts if each.layer is None]

    @property
    def layers(self) -> list[Lowered]:
        """The parts of a group in a single layer."""
        return [each for each in self.parts if each.layer is not None]


def sensitivities(state: SweepState) -> list[Sensitivity]:
    """Return the sensitivities of each model and target with a measured base.

    Raises:
        ConfigError: if no base is measured.
    """
    places: dict[tuple[str, ...], list[SweptRow]] = {}
    for row in rows(state):
        places.setdefault(row.cell.place, []).append(row)
    found = []
    for members in places.values():
        base = next((row for row in members if state.planned.is_base(row.cell)), None)
        if base is not None and _is_comparable(base.accuracy, base.accuracy):
            found.append(_sensitivity(base, members))
    if not found:
        raise ConfigError("the sweep's base has no accuracy yet; allowed: a sweep that has run on")
    return found


def observations(found: Sequence[SweptRow]) -> list[Observation]:
    """Return the timed rows as a cost model's observations."""
    return [
        Observation(row.name, row.cell.step_bytes, 1e3 / row.speed)
        for row in found
        if row.speed and row.cell.step_bytes
    ]


def _sensitivity(base: SweptRow, members: Sequence[SweptRow]) -> Sensitivity:
    try:
        model = fit(observations(members))
    except ConfigError:
        model = None
    parts = [
        _lowered(base, row, model)
        for row in members
        if row.cell.part and _is_comparable(row.accuracy, base.accuracy)
    ]
    return Sensitivity(base, tuple(parts), model)


def _lowered(base: SweptRow, row: SweptRow, model: CostModel | None) -> Lowered:
    ours, theirs = row.accuracy, base.accuracy
    assert ours is not None and theirs is not None
    assert ours.kl_mean is not None and theirs.kl_mean is not None
    part = row.cell.part
    is_layer = "." in part
    share = 100 / theirs.num_positions
    return Lowered(
        part=part,
        precision=row.cell.precision,
        kl_lost=ours.kl_mean - theirs.kl_mean,
        kl_error=math.hypot(_error(ours), _error(theirs)),
        top1_lost=share * (theirs.num_top1 - ours.num_top1),
        paired=ours.paired,
        bytes_saved=_bytes_saved(base, row),
        measured=None if is_layer else _saved(base, row),
        predicted=_predicted(base, row, model) if is_layer else None,
        is_same=base.effective_id is not None and base.effective_id == row.effective_id,
    )


def _is_comparable(ours: Accuracy | None, theirs: Accuracy | None) -> bool:
    """Return whether both divergences are known for the same reference."""
    if ours is None or theirs is None or ours.kl_mean is None or theirs.kl_mean is None:
        return False
    return ours.reference_id == theirs.reference_id


def _error(accuracy: Accuracy) -> float:
    return math.inf if accuracy.kl_error is None else accuracy.kl_error


def _bytes_saved(base: SweptRow, row: SweptRow) -> int:
    """Return the bytes saved: measured if both are measured, else estimated."""
    before, after = base.measured_bytes, row.measured_bytes
    if before is None or after is None:
        before, after = base.cell.weight_bytes, row.cell.weight_bytes
    return (before or 0) - (after or 0)


def _saved(base: SweptRow, lowered: SweptRow) -> Saved | None:
    """Return the saving by round, so that disturbances of the machine affect both."""
    differences = [
        1e3 / base.by_round[number] - 1e3 / lowered.by_round[number]
        for number in common_rounds([base, lowered])
    ]
    return Saved(*stats.mean_interval(differences)) if differences else None


def _predicted(base: SweptRow, row: SweptRow, model: CostModel | None) -> float | None:
    before, after = base.cell.step_bytes, row.cell.step_bytes
    if model is None or not (model.knows(before) and model.knows(after)):
        return None
    return model.predict(before) - model.predict(after)
