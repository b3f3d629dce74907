"""Teacher-forced agreement of a compiled model with its fp32 reference.

512 tokens are prefilled, 511 decode steps follow, and 512 predictions count. Top-1: the argmax is
the reference's first prediction. Top-5: it is among the reference's five.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.compiler.artifacts.digests import sources_digest
from tilewright.compiler.artifacts.paths import cache_dir
from tilewright.compiler.targets.interface.base import Executable
from tilewright.errors import CompileError
from tilewright.evaluate.cases.cases import ACCURACY_TEXT
from tilewright.evaluate.cases.reference import AccuracyReference, write_cache
from tilewright.evaluate.results.record import Accuracy, Paired, pack_hits
from tilewright.evaluate.results.stats import mean_and_error
from tilewright.runtime.engine import Engine
from tilewright.utils.environment import versions

BASE = "bf16"
"""The configuration for paired comparisons at the same positions."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of an executable and its divergence from the reference.

    Attributes:
        guesses: Likeliest token at every counted position.
        kl: KL(reference || executable) in nats, by position. Empty: no reference logits.
    """

    guesses: tuple[int, ...]
    kl: tuple[float, ...]


def teacher_force(
    executable: Executable,
    reference: AccuracyReference,
    logits: Tensor | None = None,
    *,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Predictions:
    """Run the text of a reference through prefill and decode steps.

    Args:
        logits: The reference's logits, ``[predictions, vocab]``. None: no KL.
        on_step: Called with the completed and total prediction count.

    Raises:
        CompileError: Logits are not finite.
    """
    engine, total = Engine(executable), len(reference.guesses)
    guesses, kl = list[int](), list[float]()
    for step, rows in enumerate(_predicted(engine, reference)):
        check_logits(rows, step)
        guesses.append(int(rows[0].argmax()))
        if logits is not None:
            kl.append(divergence(logits[step], rows[0]))
        on_step(step + 1, total)
    return Predictions(tuple(guesses), tuple(kl))


def _predicted(engine: Engine, reference: AccuracyReference) -> Iterator[Tensor]:
    """Yield the logits ``[1, vocab]`` of each predicted position."""
    tokens = torch.tensor(reference.tokens)
    yield engine.prefill([0], [tokens[: reference.prefill]])
    end = reference.prefill + len(reference.guesses) - 1
    yield from engine.decode_text(0, tokens[reference.prefill : end])
    engine.remove([0])


def divergence(reference_V: Tensor, logits_V: Tensor) -> float:
    """Return KL(softmax(reference) || softmax(logits)) in nats, in float64. NaN if a logit is
    NaN.
    """
    wanted = reference_V.double().log_softmax(-1)
    found = logits_V.double().log_softmax(-1)
    divergence = float((wanted.exp() * (wanted - found)).sum())
    return 0.0 if divergence < 0 else divergence  # rounding error; max() would turn a NaN into 0


def check_logits(rows: Tensor, step: int) -> None:
    """Raise an error if logits ``[sequences, vocab]`` are not finite.

    Raises:
        CompileError: Names the predicted position, counted from 0.
    """
    if not bool(rows.isfinite().all()):
        raise CompileError(
            f"logits of predicted position {step} are not finite (NaN or infinite), so that there "
            "is no accuracy to tell; allowed: a model and a configuration with finite logits"
        )


def score(
    predictions: Predictions,
    reference: AccuracyReference,
    *,
    base: Predictions | None = None,
    base_name: str = BASE,
    text: str = ACCURACY_TEXT,
) -> Accuracy:
    """Return hits, counts, intervals, mean KL and, with ``base``, the paired comparison.

    Args:
        text: Name of the reference's text.
    """
    right = _right(predictions, reference)
    among = [
        guess in five for guess, five in zip(predictions.guesses, reference.guesses, strict=True)
    ]
    paired = None
    if base is not None:
        paired = Paired.from_hits(base_name, theirs=_right(base, reference), ours=right)
    kl_mean, kl_error = mean_and_error(predictions.kl) if predictions.kl else (None, None)
    return Accuracy.from_counts(
        reference.id,
        num_positions=len(right),
        num_top1=sum(right),
        num_top5=sum(among),
        kl_mean=kl_mean,
        paired=paired,
        hits=pack_hits(right),
        kl_error=kl_error,
        text=text,
    )


def predictions_key(executable: Executable, *, target: str, compute: str, precision_id: str) -> str:
    """Return a key of all influences on predictions except the reference.

    These are target, arithmetic, configuration, device, source code and libraries. Predictions with
    different keys are not comparable.
    """
    device = f"{executable.device_name} {executable.device_detail}"
    parts = [device, sources_digest(), *sorted(map("=".join, versions().items()))]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return f"{target}-{compute}-{precision_id}-{digest}"


def remember(predictions: Predictions, reference: AccuracyReference, key: str) -> None:
    """Cache predictions for later comparisons."""
    write_cache(_predictions_path(reference, key), json.dumps(predictions.guesses).encode())


def recall(reference: AccuracyReference, key: str) -> Predictions | None:
    """Return the cached predictions for a key, or None."""
    try:
        found = json.loads(_predictions_path(reference, key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, list) or len(found) != len(reference.guesses):
        return None
    return Predictions(tuple(found), ())


def _right(predictions: Predictions, reference: AccuracyReference) -> list[bool]:
    pairs = zip(predictions.guesses, reference.guesses, strict=True)
    return [guess == five[0] for guess, five in pairs]


def _predictions_path(reference: AccuracyReference, key: str) -> Path:
    return cache_dir() / "predictions" / reference.id / f"{key}.json"
