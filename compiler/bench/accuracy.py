"""Teacher-forced agreement of a compiled model with its fp32 reference, on the same positions.

512 tokens are prefilled, 511 steps of one token follow, 512 predictions are counted. Top-1: the
argmax is the reference's first guess; top-5: it is among the reference's five.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.compiler.artifacts.places import cache_dir
from tilewright.compiler.bench.cases import ACCURACY_TEXT
from tilewright.compiler.bench.record import Accuracy, Paired, pack_hits
from tilewright.compiler.bench.reference import Reference, write_cache
from tilewright.compiler.runtime.engine import Engine
from tilewright.compiler.targets.base import Executable

BASE = "bf16"
"""The configuration that others are compared with, position by position."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """What an executable guessed at every counted position, and its divergence from the reference.

    ``kl``: KL(reference || executable) in nats, one a position; empty without reference logits.
    """

    guesses: tuple[int, ...]
    kl: tuple[float, ...]


def teacher_force(
    executable: Executable,
    reference: Reference,
    logits: Tensor | None = None,
    *,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Predictions:
    """Feed the reference's text through prefill and decode steps; collect every prediction.

    ``logits``: the reference's own ``[predictions, vocab]``, for KL.
    """
    engine = Engine(executable)
    tokens = torch.tensor(reference.tokens)
    rows = [engine.prefill([0], [tokens[: reference.prefill]])[0]]
    guesses, kl = [], []
    num_predictions = len(reference.guesses)
    for step in range(num_predictions):
        if step:
            at = reference.prefill + step - 1
            rows = [engine.decode([0], tokens[at : at + 1])[0]]
        guesses.append(int(rows[0].argmax()))
        if logits is not None:
            kl.append(divergence(logits[step], rows[0]))
        on_step(step + 1, num_predictions)
    engine.remove([0])
    return Predictions(tuple(guesses), tuple(kl))


def divergence(reference_V: Tensor, logits_V: Tensor) -> float:
    """KL(softmax(reference) || softmax(logits)) in nats, in float64."""
    wanted = reference_V.double().log_softmax(-1)
    found = logits_V.double().log_softmax(-1)
    return max(0.0, float((wanted.exp() * (wanted - found)).sum()))


def score(
    predictions: Predictions,
    reference: Reference,
    *,
    base: Predictions | None = None,
    text: str = ACCURACY_TEXT,
) -> Accuracy:
    """Hits, counts, intervals, mean KL, and the comparison with ``base`` where there is one.

    ``text`` names what the reference is of.
    """
    right = _right(predictions, reference)
    among = [
        guess in five for guess, five in zip(predictions.guesses, reference.guesses, strict=True)
    ]
    paired = None
    if base is not None:
        pairs = list(zip(_right(base, reference), right, strict=True))
        paired = Paired.from_counts(
            BASE,
            b=sum(one and not other for one, other in pairs),
            c=sum(other and not one for one, other in pairs),
        )
    return Accuracy.from_counts(
        reference.id,
        num_positions=len(right),
        num_top1=sum(right),
        num_top5=sum(among),
        kl_mean=sum(predictions.kl) / len(predictions.kl) if predictions.kl else None,
        paired=paired,
        hits=pack_hits(right),
        kl_error=standard_error(predictions.kl),
        text=text,
    )


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean of ``values``, taken as independent; None for fewer than two."""
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)


def remember(predictions: Predictions, reference: Reference, key: str) -> None:
    """Keep predictions in the cache, so that later runs can be compared with them."""
    write_cache(_predictions_path(reference, key), json.dumps(predictions.guesses).encode())


def recall(reference: Reference, key: str) -> Predictions | None:
    """Predictions kept under ``key`` for this reference, if there are any."""
    try:
        found = json.loads(_predictions_path(reference, key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, list) or len(found) != len(reference.guesses):
        return None
    return Predictions(tuple(found), ())


def _right(predictions: Predictions, reference: Reference) -> list[bool]:
    pairs = zip(predictions.guesses, reference.guesses, strict=True)
    return [guess == five[0] for guess, five in pairs]


def _predictions_path(reference: Reference, key: str) -> Path:
    return cache_dir() / "predictions" / reference.id / f"{key}.json"
