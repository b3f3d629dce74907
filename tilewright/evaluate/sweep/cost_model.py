"""A linear model of a decode step's time by bytes read, fitted on measured configurations.

Its values are predictions, and are marked as predictions everywhere.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.errors import ConfigError

_MAX_KINDS = 8


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured configuration: bytes read per step by storage, and the time in ms."""

    name: str
    step_bytes: Mapping[str, int]
    ms: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """A fixed time per step, and a time per byte for each storage.

    ``errors`` has (predicted - measured) / measured for each observation with the observation left
    out of the fit. None: the other observations are too few.
    """

    fixed_ms: float
    ms_per_byte: Mapping[str, float]
    errors: Mapping[str, float | None]

    def knows(self, step_bytes: Mapping[str, int]) -> bool:
        """Return whether every storage in ``step_bytes`` was observed."""
        return all(kind in self.ms_per_byte for kind, size in step_bytes.items() if size)

    def predict(self, step_bytes: Mapping[str, int]) -> float:
        """Return a step's time in ms. Every storage must be known."""
        read = sum(self.ms_per_byte[kind] * size for kind, size in step_bytes.items() if size)
        return self.fixed_ms + read

    @property
    def median_error(self) -> float | None:
        """The median absolute error, as a fraction."""
        found = [abs(error) for error in self.errors.values() if error is not None]
        return statistics.median(found) if found else None


def fit(observations: Sequence[Observation]) -> CostModel:
    """Fit by least squares of the relative error, without negative rates.

    Raises:
        ConfigError: for fewer observations than unknowns, or for too many storage types.
    """
    found = _fit(observations)
    if found is None:
        raise ConfigError(
            f"{len(observations)} measured configurations; allowed for a cost model: at least one "
            "more than kinds of holding"
        )
    errors: dict[str, float | None] = {}
    for index, left_out in enumerate(observations):
        others = _fit([*observations[:index], *observations[index + 1 :]])
        is_known = others is not None and others.knows(left_out.step_bytes)
        predicted = others.predict(left_out.step_bytes) if others and is_known else None
        errors[left_out.name] = None if predicted is None else predicted / left_out.ms - 1
    return CostModel(found.fixed_ms, found.ms_per_byte, errors)


def _fit(observations: Sequence[Observation]) -> CostModel | None:
    kinds = sorted(
        {kind for each in observations for kind, size in each.step_bytes.items() if size}
    )
    if len(observations) < len(kinds) + 1 or len(kinds) > _MAX_KINDS:
        return None  # underdetermined, or too many combinations
    rows = [
        [1.0, *(each.step_bytes.get(kind, 0) * 1e-6 for kind in kinds)] for each in observations
    ]
    times = np.array([each.ms for each in observations])
    weighted = np.array(rows) / times[:, None]
    best = _non_negative(weighted, np.ones(len(times)))
    rates = {kind: float(rate) * 1e-6 for kind, rate in zip(kinds, best[1:], strict=True)}
    return CostModel(float(best[0]), rates, {})


def _non_negative(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the best solution without negative parts.

    Tries every set of zero parts, because the unknowns are few.
    """
    num_unknowns = matrix.shape[1]
    best, least = np.zeros(num_unknowns), np.inf
    for size in range(1, num_unknowns + 1):
        for chosen in itertools.combinations(range(num_unknowns), size):
            part, *_ = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)
            if (part < 0).any():
                continue
            error = float(((matrix[:, chosen] @ part - wanted) ** 2).sum())
            if error < least * (1 - 1e-12):
                best, least = np.zeros(num_unknowns), error
                best[list(chosen)] = part
    return best
