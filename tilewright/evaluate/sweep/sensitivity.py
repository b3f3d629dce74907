"""What lowering each part of a model costs in accuracy and wins in bytes and time.

Groups are timed; a single layer's time lies below the noise and is predicted by a cost model.
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
    """ms a decode step, the mean over rounds, with its 95 % interval from three rounds on."""

    ms: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Lowered:
    """A part at the lower level, beside the base.

    Attributes:
        part: ``ff2``, ``12.ff2``, or `plans.ALL`.
        kl_lost: KL divergence added, in nats, with its standard error.
        top1_lost: percentage points; ``paired`` is McNemar's comparison.
        bytes_saved: of the weights as the target holds them; negative where it holds more.
        measured, predicted: what a decode step is faster; a part has one of them, or none.
        is_same: the target makes the same of it as of the base: nothing is lost or won.
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
        """The layer that a part is in; None for a group of all layers."""
        layer, dot, _ = self.part.partition(".")
        return int(layer) if dot and layer.isdecimal() and layer.isascii() else None

    @property
    def group(self) -> str:
        """The part's tensor group, without its layer."""
        return self.part.rpartition(".")[2]

    @property
    def is_clear(self) -> bool:
        """Whether the divergence it adds is beyond the noise."""
        return self.kl_lost > stats.Z_95 * self.kl_error

    @property
    def kl_per_mb(self) -> float | None:
        """The nats of KL lost for every 10^6 bytes saved."""
        return self.kl_lost / self.bytes_saved * 1e6 if self.bytes_saved > 0 else None

    @property
    def kl_per_ms(self) -> float | None:
        """Nats lost for a ms saved, measured or predicted as this part's time is."""
        saved = self.measured.ms if self.measured else self.predicted
        return self.kl_lost / saved if saved is not None and saved > 0 else None


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """One model on one target: the base, its parts, the cost model where one could be fitted."""

    base: SweptRow
    parts: tuple[Lowered, ...]
    cost_model: CostModel | None

    def find(self, part: str) -> Lowered | None:
        """The part of this name, if it was measured."""
        return next((each for each in self.parts if each.part == part), None)

    @property
    def groups(self) -> list[Lowered]:
        """The parts that are a whole group, or all of them together."""
        return [each for each in self.parts if each.layer is None]

    @property
    def layers(self) -> list[Lowered]:
        """The parts that are a group of a single layer."""
        return [each for each in self.parts if each.layer is not None]


def sensitivities(state: SweepState) -> list[Sensitivity]:
    """Compute the sensitivities of each model and target whose base a sweep has measured.

    Raises:
        ConfigError: when no base has.
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
    """The rows that were timed, as a cost model takes them."""
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
    """Whether both divergences are known, from the same reference."""
    if ours is None or theirs is None or ours.kl_mean is None or theirs.kl_mean is None:
        return False
    return ours.reference_id == theirs.reference_id


def _error(accuracy: Accuracy) -> float:
    return math.inf if accuracy.kl_error is None else accuracy.kl_error


def _bytes_saved(base: SweptRow, row: SweptRow) -> int:
    """The bytes saved: of both rows as measured, or of both as estimated."""
    before, after = base.measured_bytes, row.measured_bytes
    if before is None or after is None:
        before, after = base.cell.weight_bytes, row.cell.weight_bytes
    return (before or 0) - (after or 0)


def _saved(base: SweptRow, lowered: SweptRow) -> Saved | None:
    """Round by round, so that what the machine did meanwhile counts for both."""
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
