"""A heat map for layers x groups: colors on a linear or logarithmic scale, with numbers if they
fit.

Excludes sweeps: the input is values and names, and the output is a figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilewright.errors import ConfigError
from tilewright.evaluate.plots import style as figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_heat_map"]

MAX_ANNOTATED_ROWS = 40
LOG_SPAN, MAX_SPAN = 30.0, 1e4
"""Positive values with a larger span use a logarithmic scale, which has a maximum span."""


def draw_heat_map(
    values: Sequence[Sequence[float | None]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    label: str,
    marked: Sequence[Sequence[bool]] | None = None,
) -> Figure:
    """Draw ``values[row][column]`` as colors, with the first row at the top. None: no value.

    The scale is logarithmic if positive values span more than a factor 30, with at most four
    decades.

    Args:
        label: Label for the color scale.
        marked: Cells not distinguishable from zero, drawn with a dot.

    Raises:
        ConfigError: There is no value, a value is not finite, or matplotlib is missing.
    """
    assert len(values) == len(rows) and all(len(row) == len(columns) for row in values)
    assert marked is None or [len(row) for row in marked] == [len(row) for row in values]
    known = [value for row in values for value in row if value is not None]
    if not known:
        raise ConfigError("nothing to plot: there are no values; allowed: one or more")
    for row, name in zip(values, rows, strict=True):
        if not all(value is None or math.isfinite(value) for value in row):
            raise ConfigError(f"row {name!r} has no place in a plot; allowed: finite numbers")
    low, high, is_log = _scale(known)
    caption = _heat_caption(values, low=low if is_log else None, marked=marked)
    with figures.settings():
        from matplotlib.colors import LogNorm, Normalize

        each = 0.24 if len(rows) <= MAX_ANNOTATED_ROWS else min(0.15, 40 / len(rows))
        height = each * max(len(rows), 10)
        figure = figures.new_figure(height + 6.0, title=title, caption=caption)
        axes = figure.add_subplot()
        norm = (LogNorm if is_log else Normalize)(low, high, clip=True)
        cells = [[math.nan if v is None else max(v, low) for v in row] for row in values]
        mesh = axes.pcolormesh(cells, norm=norm, cmap="viridis")
        if each > 0.08:
            mesh.set(edgecolor="white", linewidth=0.6)
        _name_axes(axes, rows=rows, columns=columns, step=math.ceil(0.13 / each))
        bar = _add_colour_bar(figure, mesh, is_log=is_log, is_cut=min(known) < low)
        figures.fit(bar.yaxis.label, label, room=height * figures.DPI)
        figure.draw_without_rendering()
        excess = axes.get_window_extent().height / figures.DPI - height
        figure.set_figheight(figure.get_figheight() - excess)
        figures.settle(figure)
        _write_cells(axes, values, mesh=mesh, marked=marked)
    return figure


def _scale(known: Sequence[float]) -> tuple[float, float, bool]:
    """Return both ends of the color scale, and whether the scale is logarithmic."""
    positive = [value for value in known if value > 0]
    if positive and max(positive) > LOG_SPAN * min(positive):
        return max(min(positive), max(positive) / MAX_SPAN), max(positive), True
    low, high = min(known), max(known)
    pad = 0.0 if high > low else abs(high) * 0.1 or 1.0
    return low - pad, high + pad, False


def _heat_caption(
    values: Sequence[Sequence[float | None]],
    *,
    low: float | None,
    marked: Sequence[Sequence[bool]] | None,
) -> str:
    parts = []
    if marked is not None and any(map(any, marked)):
        parts.append("dot: not distinguishable from zero")
    known = [value for row in values for value in row if value is not None]
    if low is not None and min(known) < low:
        parts.append(f"lowest colour: {_short(low)} and less, zero and negative too")
    if len(known) < sum(map(len, values)):
        parts.append("hatched: no value")
    return "; ".join(parts)


def _name_axes(axes: Axes, *, rows: Sequence[str], columns: Sequence[str], step: int) -> None:
    names = [figures.shown(name) for name in columns]
    # approximate character count
    room = (figures.WIDTH - 2.5) * 72 / len(names) / (0.6 * figures.LABEL_SIZE)
    slanted = max(map(len, names)) > room
    axes.set_xticks(
        [index + 0.5 for index in range(len(names))], names, fontsize=figures.LABEL_SIZE
    )
    bottom = len(rows) > MAX_ANNOTATED_ROWS and not slanted
    axes.tick_params(length=0, top=True, labeltop=True, labelbottom=bottom)
    if slanted:
        axes.set_xticks(axes.get_xticks(), names, rotation=35, ha="left", rotation_mode="anchor")
    kept = range(0, len(rows), step)
    axes.set_yticks([i + 0.5 for i in kept], [figures.shown(rows[i]) for i in kept], fontsize=7.5)
    axes.set_ylabel("layer")
    axes.invert_yaxis()
    axes.patch.set(facecolor="#f4f4f4", edgecolor="#c0c0c0", hatch="////", linewidth=0)
    axes.spines[:].set_visible(False)


def _add_colour_bar(figure: Figure, mesh: Any, *, is_log: bool, is_cut: bool) -> Axes:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    bar = figure.colorbar(mesh, aspect=40, extend="min" if is_cut else "neither")
    if is_log:
        is_long = mesh.norm.vmax > 1e3 * mesh.norm.vmin
        bar.locator = LogLocator(subs=(1.0,) if is_long else (1.0, 2.0, 5.0))
        bar.minorlocator = NullLocator()
    bar.formatter = FuncFormatter(lambda value, _: _short(value, digits=2 if is_log else 4))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=figures.LABEL_SIZE)
    bar.set_label("", fontsize=9)
    return bar.ax


def _short(value: float, *, digits: int = 2) -> str:
    """Return ``value`` with at most ``digits`` significant digits: 0, 1.2e-5, 0.012, 3.5, 120."""
    value = float(f"{value:.{digits}g}")
    if value == 0 or 0.01 <= abs(value) < 1e4:
        return f"{value:g}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def _write_cells(
    axes: Axes,
    values: Sequence[Sequence[float | None]],
    *,
    mesh: Any,
    marked: Sequence[Sequence[bool]] | None,
) -> None:
    """Draw the numbers, if all fit, and the dots."""
    width = axes.get_window_extent().width / figures.DPI * 72 / len(values[0])
    fits = len(values) <= MAX_ANNOTATED_ROWS and width >= 6 * 0.62 * figures.LABEL_SIZE + 8
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if value is None:
                continue
            red, green, blue, _ = mesh.cmap(mesh.norm(max(value, mesh.norm.vmin)))
            ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
            if fits:
                place: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 7.5}
                axes.text(column + 0.5, row + 0.5, _short(value), color=ink, **place)
            if marked is not None and marked[row][column]:
                x = column + (0.1 if fits else 0.5)
                axes.plot(x, row + 0.5, ".", color=ink, markersize=3.5, clip_on=False)
