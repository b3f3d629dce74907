"""Figures for a sweep: speed against accuracy with the front, the heat map, and saving.

Excludes sweeps and result files: the input is ranked points, and the output is a figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from tilewright.errors import ConfigError
from tilewright.evaluate.plots.heat_map import draw_heat_map
from tilewright.evaluate.plots.labels import (
    LEADER_START,
    MARKER_RADIUS,
    Box,
    Label,
    Spot,
    place_labels,
)
from tilewright.evaluate.plots.style import (
    DPI,
    LABEL_SIZE,
    fit,
    new_figure,
    save,
    settings,
    settle,
    shown,
)
from tilewright.evaluate.results.pareto import ParetoRank, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_front", "draw_heat_map", "save"]

MAX_HEIGHT = 40.0  # inches

STANDINGS = {
    "front": ("front", "#0060a8", "o", 6.5),
    "tied": ("not distinguishable from the front", "#d2500a", "D", 6.0),
    "dominated": ("dominated", "#8c8c8c", "s", 5.0),
}
"""Legend text, color, marker and marker size by standing, in legend order."""


def draw_front(
    placed: Sequence[ParetoRank],
    *,
    title: str,
    speed_label: str,
    accuracy_label: str,
    base: str | None = None,
) -> Figure:
    """Draw speed against top-1, with the front as a step line and a label for every point.

    Points at the same position share a label. The figure grows until all labels fit.

    Args:
        base: The base configuration's name, marked in its label.

    Raises:
        ConfigError: There are no points, a point is not finite, the labels do not fit, or
            matplotlib is missing.
    """
    if not placed:
        raise ConfigError("nothing to plot: there are no points; allowed: one or more")
    for point in (one.point for one in placed):
        if not all(map(math.isfinite, _extent(point, 0) + _extent(point, 1))):
            raise ConfigError(f"{point.name!r} has no place in a plot; allowed: finite numbers")
    caption = _front_caption(placed, base)
    with settings():
        for factor in (1.0, 1.3, 1.7, 2.3, 3.0, 4.5):
            height = min(factor * _usual_height(placed), MAX_HEIGHT)
            figure = new_figure(height, title=title, caption=caption)
            axes = figure.add_subplot()
            _set_limits(axes, placed)
            # The front counts twice: a label on the front costs more than on a bar.
            lines = _draw_bars(axes, placed) + 2 * _draw_step(axes, placed)
            _draw_markers(axes, placed)
            for axis, name in ((axes.xaxis, speed_label), (axes.yaxis, accuracy_label)):
                axis.set_label_text("")
                fit(axis.label, name, room=4.0 * DPI)
            settle(figure)
            if _draw_labels(axes, placed, base=base, lines=lines):
                return figure
    raise ConfigError(f"{len(placed)} points are too many to label; allowed: fewer in one plot")


def _usual_height(placed: Sequence[ParetoRank]) -> float:
    return 5.2 + 0.1 * max(0, len(placed) - 12)


def _extent(point: Point, axis: int) -> tuple[float, ...]:
    """Return a point's position on an axis, and the ends of its bar if present."""
    if axis == 0:
        return (point.speed, *point.rounds)
    return (point.top1, *(point.top1_interval or ()))


def _front_caption(placed: Sequence[ParetoRank], base: str | None) -> str:
    bars = []
    if any(one.point.top1_interval for one in placed):
        bars.append("95 % Wilson interval of top-1")
    counts = sorted({len(one.point.rounds) for one in placed if len(one.point.rounds) > 1})
    if counts:
        text = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        bars.append(f"range of speed over {text} rounds")
    caption = "bars: " + "; ".join(bars) if bars else "no bars: single values"
    errors = [e for e in (one.point.speed_error for one in placed) if e is not None]
    if errors:
        known = f"{100 * max(errors):.0f} %" if math.isfinite(max(errors)) else "unknown"
        caption += f"; error of the predicted speeds: {known}"
    if base is not None and all(one.point.name != base for one in placed):
        caption += f"; the base {shown(base)} is not among the points"
    return caption


def _set_limits(axes: Axes, placed: Sequence[ParetoRank]) -> None:
    from matplotlib.ticker import MaxNLocator

    for index, axis in enumerate((axes.xaxis, axes.yaxis)):
        values = [value for one in placed for value in _extent(one.point, index)]
        low, high = min(values), max(values)
        # points within a thousandth do not spread over the whole plot
        pad = max(0.08 * (high - low), 0.001 * abs(high)) if high > low else 0.05 * abs(high) or 1.0
        low, high = low - pad, high + pad
        ticks = MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        most = 100.0 if index else math.inf  # space above 100 %, without a tick
        axis.set_ticks([tick for tick in ticks if max(low, 0) <= tick <= min(high, most)])
        (axes.set_ylim if index else axes.set_xlim)(low, high)
    axes.ticklabel_format(useOffset=False)
    axes.grid(color="#e8e8e8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bars(axes: Axes, placed: Sequence[ParetoRank]) -> list[Box]:
    """Draw the bars and return their boxes in axis values."""
    boxes = []
    for one in placed:
        x, y, colour = one.point.speed, one.point.top1, STANDINGS[one.standing][1]
        xs, ys = _extent(one.point, 0), _extent(one.point, 1)
        for box in (Box(min(xs), y, max(xs), y), Box(x, min(ys), x, max(ys))):
            axes.plot([box.x0, box.x1], [box.y0, box.y1], color=colour, alpha=0.45, linewidth=1.1)
            boxes.append(box)
    return boxes


def _draw_step(axes: Axes, placed: Sequence[ParetoRank]) -> list[Box]:
    """Draw the front: for every speed, the best top-1 at this speed or a higher speed."""
    points = sorted((one.point.speed, one.point.top1) for one in placed if one.standing == "front")
    if not points:
        return []
    x, corners = axes.get_xlim()[0], []
    for index, (speed, _) in enumerate(points):
        best = max(top1 for _, top1 in points[index:])
        corners += [(x, best), (speed, best)]
        x = speed
    corners.append((x, axes.get_ylim()[0]))
    xs, ys = zip(*corners, strict=True)
    axes.plot(xs, ys, color=STANDINGS["front"][1], linewidth=1.4, zorder=2.5, label="_front")
    return [Box(min(a, c), min(b, d), max(a, c), max(b, d)) for (a, b), (c, d) in pairwise(corners)]


def _draw_markers(axes: Axes, placed: Sequence[ParetoRank]) -> None:
    for standing, (text, colour, marker, size) in STANDINGS.items():
        points = [one.point for one in placed if one.standing == standing]
        axes.plot(
            [point.speed for point in points],
            [point.top1 for point in points],
            linestyle="none",
            marker=marker,
            markersize=size,
            # Hollow and on top: the tied front point remains visible.
            markerfacecolor="none" if standing == "tied" else colour,
            markeredgecolor=colour,
            label=text,
            zorder={"dominated": 4, "front": 5, "tied": 6}[standing],
        )
    axes.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=LABEL_SIZE
    )


def _draw_labels(
    axes: Axes, placed: Sequence[ParetoRank], *, base: str | None, lines: Sequence[Box]
) -> bool:
    """Label every position. Return whether all labels fit. If not, nothing is drawn."""
    groups: dict[Spot, list[ParetoRank]] = {}
    for one in placed:
        groups.setdefault((one.point.speed, one.point.top1), []).append(one)
    names = []
    for group in groups.values():
        parts = (shown(one.point.name) + " (base)" * (one.point.name == base) for one in group)
        names.append("\n".join(dict.fromkeys(parts)))
    scale = 72 / DPI  # pixels to points

    def to_points(x: float, y: float) -> Spot:
        place = axes.transData.transform((x, y))
        return float(place[0] * scale), float(place[1] * scale)

    def to_box(box: Box) -> Box:
        return Box(*to_points(box.x0, box.y0), *to_points(box.x1, box.y1))

    sizes = []
    for name in names:
        text = axes.text(0, 0, name, fontsize=LABEL_SIZE)
        extent = text.get_window_extent()
        text.remove()
        sizes.append((extent.width * scale, extent.height * scale))
    anchors = [to_points(*position) for position in groups]
    r = MARKER_RADIUS
    markers = [Box(x - r, y - r, x + r, y + r) for x, y in anchors]
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    labels = place_labels(
        anchors,
        sizes,
        inside=to_box(Box(x0, y0, x1, y1)),
        markers=markers,
        lines=[to_box(line) for line in lines],
    )
    for index, label in enumerate(labels or ()):
        position = list(groups)[index]
        _draw_label(axes, names[index], position=position, anchor=anchors[index], label=label)
    return labels is not None


def _draw_label(axes: Axes, name: str, *, position: Spot, anchor: Spot, label: Label) -> None:
    box, (across, up) = label.box, label.side
    x = (box.x0, (box.x0 + box.x1) / 2, box.x1)[across + 1]
    y = (box.y0, (box.y0 + box.y1) / 2, box.y1)[up + 1]
    offset = (x - anchor[0], y - anchor[1])
    if label.leader is not None:
        line = {"arrowstyle": "-", "color": "#707070", "linewidth": 0.6}
        line |= {"shrinkA": 0, "shrinkB": LEADER_START}
        axes.annotate("", position, offset, textcoords="offset points", arrowprops=line, zorder=7)
    axes.annotate(
        name,
        position,
        offset,
        textcoords="offset points",
        ha=("left", "center", "right")[across + 1],
        va=("bottom", "center", "top")[up + 1],
        multialignment=("left", "center", "right")[across + 1],
        fontsize=LABEL_SIZE,
        bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.3},
        zorder=8,
    )
