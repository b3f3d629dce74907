"""``python -m bench compare-calibrated``: top-1 and KL against a checkpoint's fp32 weights.

Float arithmetic on format values. Activation, KV formats and fidelity are excluded.
Every text position counts.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright.errors import ConfigError
from tilewright.evaluate.results.stats import mean_ratio
from tilewright.models import calibrated_precision, find_model
from tilewright.options.arguments import integer, option, parse

_BLOCK = 128
"""Neighboring positions in an observation, for paired standard errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    texts: tuple[str, ...] = option(
        "text files, each with :TOKENS (default: all of its whole sequences)",
        "texts",
        default=(),
        nargs="*",
    )
    model: str | None = option("the original checkpoint (default: smollm2)", metavar="PATH")
    weights: tuple[str, ...] = option(
        "calibrated folders, checkpoints, or configuration names for "
        "round to nearest. Paired values compare with the first checkpoint",
        default=("performance",),
        metavar="NAME",
    )
    length: int = option("tokens per sequence", default=512, type=integer(16, 1 << 16))


def main(argv: list[str]) -> int:
    """Run the comparison with its arguments and return the exit code."""
    options = parse(
        _Options, argv, prog="python -m bench compare-calibrated", description="Compare weights."
    )
    if not options.texts:
        raise ConfigError("no texts; allowed: one text file or more")
    warnings.filterwarnings("ignore", module="torch")
    import torch

    from tilewright.compiler.calibration.forward import sequences
    from tilewright.evaluate.tracing.logits import Observed, observe
    from tilewright.models import load_model

    model = load_model(find_model(options.model))
    parts, names = [], []
    for spec in options.texts:
        path, _, count = spec.partition(":")
        text = Path(path).read_text(encoding="utf-8")
        cut = sequences(model.tokenizer.encode(text), options.length, int(count or 1 << 30))
        if not cut.numel():
            raise ConfigError(f"{path}: fewer tokens than {options.length}")
        parts.append(cut)
        names += [Path(path).name] * cut.numel()
        print(f"{path}: {cut.numel()} tokens, {hashlib.sha256(text.encode()).hexdigest()[:12]}")
    tokens = torch.cat(parts)
    truth = observe(model, "reference", tokens)
    found: dict[str, Observed] = {}
    for name in options.weights:
        is_checkpoint = Path(name).exists()
        own = load_model(find_model(name)) if is_checkpoint else model
        precision = _precision_of(name) if is_checkpoint else name
        found[name] = observe(own, precision, tokens, against=truth)
        print(line_of(name, found[name], found[options.weights[0]], names), flush=True)
    return 0


def _precision_of(checkpoint: str) -> str:
    """Return a calibrated folder's precision, else ``stored``."""
    calibrated = calibrated_precision(find_model(checkpoint))
    return "stored" if calibrated is None else str(calibrated)


def line_of(name: str, found: object, base: object, names: Sequence[str]) -> str:
    """Return a row: top-1, KL, paired points with standard errors, and top-1 by text.

    Args:
        name: First column.
        found: Agreement with these weights.
        base: Agreement with the first row's weights.
        names: Text name by position.
    """
    import torch

    from tilewright.evaluate.tracing.logits import Observed

    assert isinstance(found, Observed) and isinstance(base, Observed)
    right, before = found.right.float(), base.right.float()
    gain = (right - before)[: right.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK).mean(1)
    error = float(gain.std() / gain.numel() ** 0.5) if gain.numel() > 1 else float("nan")
    won, lost = int((right > before).sum()), int((right < before).sum())
    by_text = []
    for text in dict.fromkeys(names):
        inside = torch.tensor([each == text for each in names])
        share, divergence = float(right[inside].mean()), float(found.kl[inside].mean())
        by_text.append(f"{text} {100 * share:.1f}/{divergence:.4f}")
    ratio = mean_ratio(found.kl.tolist(), base.kl.tolist())
    low, high = (ratio.interval if ratio else None) or (float("nan"), float("nan"))
    return (
        f"{name}: top-1 {100 * float(right.mean()):.2f} %, KL {float(found.kl.mean()):.4f} "
        f"({low:.3f} to {high:.3f} of the base's), "
        f"paired {100 * float(gain.mean()):+.2f} +- {100 * error:.2f} ({won} won, {lost} lost); "
        + ", ".join(by_text)
    )
