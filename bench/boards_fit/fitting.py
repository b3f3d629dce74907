"""Fits the performance model's constants to published times, with errors on held-out rows.

Uses robust least squares on log ratios. Constants stay positive, because their logarithms are
fitted. Knows samples (a program's work and a published time), not programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tilewright.compiler.targets.tenstorrent.perf.constants import START, Constants
from tilewright.compiler.targets.tenstorrent.perf.estimate import once_seconds, work_seconds
from tilewright.compiler.targets.tenstorrent.perf.work import InstructionCost

Vector = NDArray[np.float64]
C = TypeVar("C", bound=Any)
"""Type for constants: a dataclass with positive numbers."""

DECODE_NAMES = (
    *("bank_bytes_per_s", "tile_cycles", "op_seconds", "bias_seconds", "ring_seconds"),
    *("galaxy_ring_seconds", "step_seconds"),
)
PREFILL_NAMES = (
    *("product_factor", "prefill_op_seconds", "prefill_ring_seconds", "prefill_seconds"),
)

_HUBER = 0.05
"""Errors above it have linear weight. Some published rows differ from each other by more."""
_PULL = 1e-4
"""Weight for the squared log distance to the start. It fixes constants without data."""
_MAX_STEPS, _TOLERANCE, _NUDGE = 100, 1e-9, 1e-4


@dataclass(frozen=True, slots=True)
class Sample:
    """A published time for a step or a prompt in seconds, with its work."""

    model: str
    device: str
    source: str
    seconds: float
    work: tuple[tuple[InstructionCost, float], ...]
    is_decode: bool

    def predict(self, constants: Constants) -> float:
        """Return the predicted seconds for the sample."""
        once = once_seconds(constants, is_decode=self.is_decode)
        return once + sum(
            count * work_seconds(work, constants, is_decode=self.is_decode)[0]
            for work, count in self.work
        )

    def error(self, constants: Constants) -> float:
        """Return the prediction's relative error."""
        return self.predict(constants) / self.seconds - 1


def fit(samples: Sequence[Any], names: Sequence[str], start: C = START) -> C:  # type: ignore[assignment]
    """Fit the constants ``names`` to samples. The other constants are as in ``start``.

    Uses Gauss-Newton with Levenberg's damping and Huber's weights on log(predicted / published).
    """
    assert len(samples) >= len(names)
    first = np.log([getattr(start, name) for name in names])
    target = np.log([sample.seconds for sample in samples])

    def errors(x: Vector) -> Vector:
        constants = _with(start, names, x)
        found: Vector = np.log([sample.predict(constants) for sample in samples]) - target
        return found

    x, error, damping = first.copy(), errors(first), 1e-2
    for _ in range(_MAX_STEPS):
        jacobian = np.stack(
            [(errors(x + nudge) - error) / _NUDGE for nudge in _NUDGE * np.eye(len(x))], axis=1
        )
        weight = np.minimum(1.0, _HUBER / np.maximum(np.abs(error), 1e-12))
        normal = jacobian.T @ (weight[:, None] * jacobian) + _PULL * np.eye(len(x))
        slope = jacobian.T @ (weight * error) + _PULL * (x - first)
        before, gain = _cost(error, x - first), 0.0
        for _ in range(10):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slope)
            tried = x - np.clip(step, -1.0, 1.0)
            error_tried = errors(tried)
            gain = before - _cost(error_tried, tried - first)
            if gain > 0:
                x, error, damping = tried, error_tried, max(damping / 4, 1e-9)
                break
            damping *= 4
        if gain < _TOLERANCE:
            break
    return _with(start, names, x)


def held_out(
    samples: Sequence[Any], names: Sequence[str], key: Callable[[Any], Hashable], start: Any = START
) -> list[float]:
    """Return each sample's error with constants fitted without its key's samples."""
    fitted = {
        left: fit([sample for sample in samples if key(sample) != left], names, start)
        for left in {key(sample) for sample in samples}
    }
    return [sample.error(fitted[key(sample)]) for sample in samples]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation. Equal values have their mean rank."""
    ranks = [_ranks(np.asarray(each, dtype=np.float64)) for each in (first, second)]
    a, b = (each - each.mean() for each in ranks)
    return float((a @ b) / np.sqrt((a @ a) * (b @ b)))


def _ranks(values: Vector) -> Vector:
    below = (values[None, :] < values[:, None]).sum(axis=1)
    equal = (values[None, :] == values[:, None]).sum(axis=1)
    found: Vector = below + (equal - 1) / 2
    return found


def _with(start: C, names: Sequence[str], x: Vector) -> C:
    return dataclasses.replace(start, **dict(zip(names, np.exp(x).tolist(), strict=True)))


def _cost(error: Vector, distance: Vector) -> float:
    size = np.abs(error)
    loss = np.where(size < _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2))
    return float(loss.sum() + _PULL * (distance**2).sum() / 2)
