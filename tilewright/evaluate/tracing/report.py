"""A trace as a table and as a figure."""

from __future__ import annotations

from pathlib import Path

from tilewright.evaluate.report.table import Table
from tilewright.evaluate.tracing.cache_formats import CacheSelection
from tilewright.evaluate.tracing.layer_trace import LossTrace, TraceRow


def trace_table(trace: LossTrace, most: int) -> Table:
    """Return a trace's first rows."""
    names = (
        "place",
        "operation",
        "format",
        "KL gain (nats)",
        "top-1 gain (positions)",
        "own error",
        "error",
        "correlation",
        "worst (std)",
    )
    return Table.of(names, [_cells(row) for row in trace.rows[:most]])


def _cells(loss: TraceRow) -> tuple[str, ...]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        loss.place,
        loss.operation,
        loss.format,
        number(loss.kl_gain, "+.5f"),
        number(loss.flips, "+d"),
        number(loss.own_error, ".4f"),
        number(loss.error, ".4f"),
        number(loss.correlation, ".5f"),
        number(loss.largest, ".2f"),
    )


def plot_trace(trace: LossTrace, path: Path, title: str) -> None:
    """Write every operation's own error by layer.

    Raises:
        ConfigError: where the plot library is missing, or the file cannot be written.
    """
    from tilewright.evaluate.plots.style import save, settings

    lines: dict[str, list[tuple[int, float]]] = {}
    for row in trace.rows:
        if row.place.startswith("layer ") and row.own_error is not None:
            lines.setdefault(row.operation, []).append((int(row.place[6:]), row.own_error))
    with settings():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for name, points in sorted(lines.items()):
            points.sort()
            axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=name)
        axes.set(xlabel="layer", ylabel="relative error of outputs", title=title)
        axes.legend()
        save(figure, path)


def selection_lines(selection: CacheSelection) -> list[tuple[str, ...]]:
    """Return a line for each layer's keys and values: added KL by format, selected format."""
    names = tuple(dict.fromkeys(name for _, name in selection.losses))
    lines: list[tuple[str, ...]] = [("unit", *(f"KL of {name}" for name in names), "selected")]
    for unit, selected in selection.formats.items():
        losses = (f"{selection.losses[unit, name].kl:.1e}" for name in names)
        lines.append((str(unit), *losses, selected))
    return lines
