"""Teacher-forced agreement of a compiled model with its fp32 reference, on the same positions.

512 tokens are prefilled, 511 steps of one token follow, 512 predictions are counted. Top-1: the
argmax is the reference's first guess; top-5: it is among the reference's five.
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
    reference: AccuracyReference,
    logits: Tensor | None = None,
    *,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Predictions:
    """Feed the text of a reference through prefill and decode steps.

    ``logits``: those of the reference, ``[predictions, vocab]``. None: no KL.

    Raises:
        CompileError: for logits that are not finite.
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
    for position in range(reference.prefill, reference.prefill + len(reference.guesses) - 1):
        yield engine.decode([0], tokens[position : position + 1])
    engine.remove([0])


def divergence(reference_V: Tensor, logits_V: Tensor) -> float:
    """KL(softmax(reference) || softmax(logits)) in nats, in float64; NaN where a logit is one."""
    wanted = reference_V.double().log_softmax(-1)
    found = logits_V.double().log_softmax(-1)
    divergence = float((wanted.exp() * (wanted - found)).sum())
    return 0.0 if divergence < 0 else divergence  # rounding; max() would make 0 of a NaN


def check_logits(rows: Tensor, step: int) -> None:
    """Refuse logits ``[sequences, vocab]`` that are no numbers: they have no likeliest token.

    Raises:
        CompileError: naming the predicted position, counted from 0.
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
    """Hits, counts, intervals, mean KL, and the comparison with ``base`` where there is one.

    ``text`` names what the reference is of.
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
    """What predictions depend on besides the reference: target, arithmetic, configuration, the
    device, our own code and the libraries. Predictions under another key are not comparable.
    """
    device = f"{executable.device_name} {executable.device_detail}"
    parts = [device, sources_digest(), *sorted(map("=".join, versions().items()))]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return f"{target}-{compute}-{precision_id}-{digest}"


def remember(predictions: Predictions, reference: AccuracyReference, key: str) -> None:
    """Keep predictions in the cache, so that later runs can be compared with them."""
    write_cache(_predictions_path(reference, key), json.dumps(predictions.guesses).encode())


def recall(reference: AccuracyReference, key: str) -> Predictions | None:
    """Predictions kept under ``key`` for this reference, if there are any."""
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
