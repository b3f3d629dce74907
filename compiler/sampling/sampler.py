"""Sampling for a row: the adjustments before `draw`.

The order is: disallowed tokens, early end tokens (if another token is allowed), bias; repetition,
frequency and presence penalties; top-n-sigma; then temperature, ``min_p``, top-k, top-p and the
inverse cumulative distribution. Targets that sample on a device must give the same tokens.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.sampling.rng import draw

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_NOTHING = -np.inf


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """A row's sampling.

    Attributes:
        sampling: parameters.
        position: the new token's position in its sequence.
        prompt: prompt tokens.
        counts: output tokens with their occurrences.
    """

    sampling: SamplingParams
    position: int
    prompt: Sequence[int] = ()
    counts: Mapping[int, int] = field(default_factory=dict)


def choose_tokens(
    logits: ArrayLike, rows: Sequence[SamplingRow], allowed: Sequence[np.ndarray | None] = ()
) -> tuple[list[int], list[bool]]:
    """Return a token for each of R rows, and whether its logit was a number.

    Args:
        logits: float32 ``[R, V]``, an array or a tensor on the CPU, unchanged.
        rows: sampling per row.
        allowed: bool ``[V]`` or None for each row, the allowed tokens. Empty: all tokens.
    """
    masks = list(allowed) if allowed else [None] * len(rows)
    values = np.asarray(logits)
    tokens: list[int] = values.argmax(-1).tolist()
    is_number = []
    for index, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        sampling = row.sampling
        line = values[index]
        if mask is not None or sampling.changes_logits:
            line = adjusted(line, row, mask)
            tokens[index] = _largest(line)
        is_number.append(bool(np.isfinite(line[tokens[index]])))
        if not sampling.is_greedy and is_number[-1]:
            tokens[index] = draw(
                line,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=sampling.seed,
                position=row.position,
            )
    return tokens, is_number


def _largest(line: np.ndarray) -> int:
    """Return the first index of the largest logit. NaN is below all numbers."""
    token = int(line.argmax())  # the first NaN, if any
    if np.isnan(line[token]):
        token = int(np.where(np.isnan(line), _NOTHING, line).argmax())
    return token


def adjusted(line: np.ndarray, row: SamplingRow, mask: np.ndarray | None) -> np.ndarray:
    """Return the logits ``[V]`` after mask, bias and penalties, as a copy."""
    sampling = row.sampling
    line = line.copy() if mask is None else np.where(mask, line, _NOTHING)
    if sampling.min_tokens > row.position - len(row.prompt) and not _only_ends(sampling, mask):
        line[list(sampling.stop_token_ids)] = _NOTHING
    for token, more in sampling.logit_bias:
        line[token] += np.float32(more)
    if sampling.is_penalised:
        _penalise(line, row)
    if sampling.top_n_sigma > 0.0:
        _keep_top_sigma(line, sampling.top_n_sigma)
    return line


def _keep_top_sigma(line: np.ndarray, width: float) -> None:
    """Keep logits of at least max - ``width`` * sigma. Sigma covers all finite logits."""
    values = line.astype(np.float64)
    finite = values[np.isfinite(values)]
    if len(finite):
        line[values < finite.max() - width * finite.std()] = _NOTHING


def _only_ends(sampling: SamplingParams, mask: np.ndarray | None) -> bool:
    """Return whether a mask allows only end tokens. Then early end tokens are allowed."""
    if mask is None:
        return False
    return not np.delete(mask, list(sampling.stop_token_ids)).any()


def _penalise(line: np.ndarray, row: SamplingRow) -> None:
    sampling = row.sampling
    counted = np.array([token for token, count in row.counts.items() if count > 0], dtype=np.int64)
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate([counted, np.asarray(row.prompt, dtype=np.int64)]))
        seen = seen[seen < len(line)]  # an image's placeholder may have no logit
        factor = np.float32(sampling.repetition_penalty)
        line[seen] = np.where(line[seen] > 0, line[seen] / factor, line[seen] * factor)
    if len(counted):
        times = np.array([row.counts[int(token)] for token in counted], dtype=np.float32)
        line[counted] -= np.float32(sampling.frequency_penalty) * times
        line[counted] -= np.float32(sampling.presence_penalty)
