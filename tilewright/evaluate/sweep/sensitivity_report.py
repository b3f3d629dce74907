"""Sensitivities as tables and heat maps. Measured and predicted times have separate tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilewright.evaluate.report.display import decimal, discordant, megabytes, span
from tilewright.evaluate.report.table import Table
from tilewright.evaluate.results import stats
from tilewright.evaluate.sweep.cost_model import CostModel
from tilewright.evaluate.sweep.journal import SweepState
from tilewright.evaluate.sweep.sensitivity import Lowered, Sensitivity, sensitivities

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COSTS = ("KL lost (nats)", "Rank", "Top-1 lost (points)", "vs base", "Saved (MB)", "KL / MB")
_LEGEND = """\
Each part is lowered alone, the rest stays as in the base. `KL lost`: mean divergence from the fp32
reference beyond the base's, +- its standard error; where that is less than 1.96 standard errors it
is marked `~` and may be nothing. `Rank` by KL lost: the places a part may have; overlapping ranges
are not distinguished by these positions. `vs base`: positions that only the lowered model (+)
and only the base (-) got right, with McNemar's exact p. A negative `Saved (MB)`: the target holds
the lowered part in more bytes than before.
"""


def markdown(state: SweepState) -> str:
    """Return the sections of a sensitivity sweep, a set per model and target."""
    return "\n".join(_sections(each) for each in sensitivities(state))


def heat_maps(state: SweepState) -> list[tuple[str, Figure]]:
    """Draw the KL lost, and lost for a predicted ms, of layers by groups; (stem, figure) each."""
    from tilewright.evaluate.plots.plot import draw_heat_map

    found = []
    for number, each in enumerate(sensitivities(state)):
        if not each.layers:
            continue
        suffix = f"-{number + 1}" if number else ""
        cell = each.base.cell
        where = f"{cell.model_name} on {cell.device}, {_level(each)} beside {each.base.name}"
        groups = list(dict.fromkeys(part.group for part in each.layers))
        layers = sorted({part.layer for part in each.layers if part.layer is not None})
        grid = [[each.find(f"{layer}.{group}") for group in groups] for layer in layers]
        for stem, label, cost in (
            ("sensitivity", "KL lost (nats)", "kl_lost"),
            ("sensitivity-per-ms", "KL lost (nats) for each ms saved (predicted)", "kl_per_ms"),
        ):
            values = [[getattr(part, cost, None) for part in row] for row in grid]
            if all(each is None for row in values for each in row):
                continue  # no time was predicted
            figure = draw_heat_map(
                values,
                rows=[str(layer) for layer in layers],
                columns=groups,
                title=where,
                label=label,
                marked=[[part is not None and not part.is_clear for part in row] for row in grid],
            )
            found.append((f"{stem}{suffix}", figure))
    return found


def _level(found: Sensitivity) -> str:
    """``bfp8:hifi2`` of ``12.ff2=bfp8:hifi2``."""
    return found.parts[0].precision.partition("=")[2] if found.parts else ""


def _sections(found: Sensitivity) -> str:
    cell = found.base.cell
    title = f"## Sensitivity: {cell.model_name} on {cell.device}, {_level(found)}"
    figures = found.base.figures()
    base = (
        f"Base `{found.base.name}`: KL {figures.kl_nats or 0:.2g}, top-1 "
        f"{decimal(figures.top1_percent)} % of {figures.positions} positions."
    )
    kind = "predicted" if found.base.is_emulated else "measured"
    times: tuple[str, ...] = (f"Saved (ms a step, {kind})", "95 % CI", f"KL / ms ({kind})")
    groups = _table(times, [part for part in found.groups if not part.is_same])
    parts = [title, f"{base}\n\n{_LEGEND.rstrip()}", f"### Groups, {kind}", groups]
    same = [part.part for part in found.groups if part.is_same]
    if same:
        parts.append(f"Not honoured on this target, so that nothing changes: {', '.join(same)}.")
    if found.layers:
        times = ("Saved (ms a step, predicted)", "KL / ms (predicted)")
        parts += ["### Groups of single layers, time predicted", _table(times, found.layers)]
    if found.cost_model is not None:
        parts += ["### The cost model", _cost_model(found.cost_model)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _table(times: tuple[str, ...], parts: Sequence[Lowered]) -> str:
    """Most costly first."""
    costs, errors = [each.kl_lost for each in parts], [each.kl_error for each in parts]
    ranks = stats.rank_groups(costs, errors) if parts else []
    lines = [_row(parts[rank.index], rank) for rank in ranks]
    return Table.of(("Part", *_COSTS, *times), lines).markdown()


def _row(part: Lowered, rank: stats.Rank) -> tuple[str, ...]:
    sure = "" if part.is_clear else "~"
    place = str(rank.best) if rank.best == rank.worst else f"{rank.best}-{rank.worst}"
    paired = part.paired
    per_mb, per_ms = part.kl_per_mb, part.kl_per_ms
    costs = (
        part.part,
        f"{sure}{part.kl_lost:.2e} +- {part.kl_error:.1e}",
        place,
        decimal(part.top1_lost),
        discordant(paired.c, paired.b, paired.p) if paired else "",
        megabytes(part.bytes_saved, 2),
        "" if per_mb is None else f"{per_mb:.2e}",
    )
    ratio = "" if per_ms is None else f"{per_ms:.2e}"
    if part.layer is not None:
        return (*costs, decimal(part.predicted, 3), ratio)
    saved = part.measured
    if saved is None:
        return (*costs, "", "", "")
    low, high = saved.interval or (None, None)
    interval = span(low, high, 2, joint=" to ")
    return (*costs, decimal(saved.ms, 2), interval, ratio)


def _cost_model(model: CostModel) -> str:
    """Return the basis and the predictions' errors."""
    rates = ", ".join(
        f"{1e9 * rate:.2f} ms for 10^9 bytes stored as {kind}"
        for kind, rate in model.ms_per_byte.items()
    )
    text = (
        f"A step takes {model.fixed_ms:.2f} ms, and {rates}: fitted on the configurations below, "
        "each of which was also predicted from the others alone."
    )
    rows = [
        (name, "" if error is None else f"{100 * error:+.1f}")
        for name, error in model.errors.items()
    ]
    return f"{text}\n\n{Table.of(('Configuration', 'Predicted, off by (%)'), rows).markdown()}"
