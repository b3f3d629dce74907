"""``tilewright trace --cache-formats``: formats of keys and values by layer, as a YAML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from tilewright.cli.terminal.console import compile_progress, err, note, out, print_columns
from tilewright.compiler.calibration.forward import sequences
from tilewright.compiler.formats import get_format
from tilewright.compiler.precision import PrecisionConfig
from tilewright.evaluate.cases.prompts import accuracy_text
from tilewright.evaluate.results.stats import wilson_interval
from tilewright.evaluate.tracing.cache_formats import (
    GUARD,
    CacheProbe,
    CacheSelection,
    Divergence,
    select_formats,
    selection_yaml,
)
from tilewright.evaluate.tracing.logits import compare, observe
from tilewright.evaluate.tracing.report import selection_lines
from tilewright.models import LoadedModel
from tilewright.utils.environment import environment
from tilewright.utils.files import write_file


def select(
    model: LoadedModel,
    original: LoadedModel,
    precision: PrecisionConfig,
    tokens_ST: Tensor,
    *,
    names: Sequence[str],
    max_kl: float,
    output: Path,
    check_text: str,
) -> int:
    """Select formats, compare them with uniform formats on another text, and write the YAML."""
    with compile_progress(err()) as progress:
        probe = CacheProbe(model, precision, tokens_ST)
        selection = select_formats(probe, names, max_kl, progress)
    text = accuracy_text(check_text).content
    length = tokens_ST.shape[1]
    other_ST = sequences(model.tokenizer.encode(text), length, length)
    lines = [
        f"{model.name}, {precision.name}: KL {selection.measured.kl:.2e} "
        f"({selection.measured.error:.1e}) against an unrounded cache, {length} positions, "
        f"bound {max_kl:g} with {GUARD:g} standard error; {selection.bits:.2f} bits a number"
    ]
    out().print(lines[0], soft_wrap=True)
    print_columns(out(), selection_lines(selection))
    if other_ST.numel():
        rows = _compared(CacheProbe(model, precision, other_ST), selection, original, other_ST)
        lines.append(f"Text {check_text} against fp32 weights, with standard errors of KL:")
        out().print(lines[-1])
        print_columns(out(), rows)
        lines += [", ".join(cells) for cells in rows]
    else:
        note(err(), f"text {check_text}: fewer than {length} tokens, so nothing is compared")
    now = environment()
    about = f"Selected by `tilewright trace --cache-formats`, commit {now.commit or 'unknown'}."
    write_file(output, selection_yaml(precision, selection, [about, *lines]).encode())
    note(err(), f"written: {output}; float arithmetic, formats of values apply on boards only")
    return 0


def _compared(
    probe: CacheProbe, selection: CacheSelection, original: LoadedModel, tokens_ST: Tensor
) -> list[tuple[str, ...]]:
    """Return accuracy against fp32 weights: unrounded, uniform and selected formats."""
    truth = observe(original, "reference", tokens_ST)
    names = dict.fromkeys(name for _, name in selection.losses)
    caches = {name: dict.fromkeys(probe.units, name) for name in names}
    rows: list[tuple[str, ...]] = []
    for label, formats in {"unrounded": {}, **caches, "selected": selection.formats}.items():
        observed = compare(*probe.outputs(formats), truth)
        kl = Divergence.of(observed.kl)
        right = int(observed.right.sum())
        low, high = wilson_interval(right, observed.right.numel())
        bits = 32.0 if not formats else sum(get_format(f).bits for f in formats.values())
        rows.append(
            (
                label,
                f"{bits / max(len(formats), 1):.2f} bits",
                f"top-1 {100 * right / observed.right.numel():.1f} %",
                f"95 % interval {100 * low:.1f} to {100 * high:.1f}",
                f"KL {kl.kl:.4f} ({kl.error:.4f})",
            )
        )
    return rows
