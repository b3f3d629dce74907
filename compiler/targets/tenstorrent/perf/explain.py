"""Table rows with a predicted step's times, and with the costs of a configuration's bytes."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict

from tilewright.compiler.targets.tenstorrent.perf.constants import Constants
from tilewright.compiler.targets.tenstorrent.perf.estimate import (
    InstructionEstimate,
    estimate,
    seconds_by_work,
)
from tilewright.compiler.targets.tenstorrent.perf.work import InstructionCost, program_work
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    DeviceProgram,
    tile_bytes,
)
from tilewright.compiler.targets.tenstorrent.program.placement import WEIGHT_FORMATS

EXPLAIN_COLUMNS = ("instruction", "count", "MB", "us", "of step", "bound")
COST_COLUMNS = ("tensor group", "format", "MB", "ms", *(f"in {name}" for name in WEIGHT_FORMATS))

_ONCE = "once a step"


def explain_rows(
    program: DeviceProgram, constants: Constants | None = None, *, attended: int | None = None
) -> list[tuple[str, ...]]:
    """Return the cells of `EXPLAIN_COLUMNS` by instruction label, longest first, step last.

    MB: bytes from a chip's DRAM, or over its links. ``bound``: the limiting resource.
    """
    lines: defaultdict[str, list[InstructionEstimate]] = defaultdict(list)
    for line in estimate(program, constants, attended=attended):
        lines[_label(line)].append(line)
    whole = sum(line.seconds for found in lines.values() for line in found)
    ordered = sorted(lines.items(), key=lambda item: -sum(line.seconds for line in item[1]))
    rows = [_cells(label, found, whole) for label, found in ordered]
    every = [line for found in lines.values() for line in found]
    return [*rows, _cells("step", every, whole)]


def cost_rows(
    program: DeviceProgram, constants: Constants | None = None, *, attended: int | None = None
) -> list[tuple[str, ...]]:
    """Return the cells of `COST_COLUMNS`: read time per tensor group in a step, in all formats.

    The fidelity is constant.
    """
    counts = Counter(work for work in program_work(program, attended=attended) if work.format)
    groups: dict[tuple[str, str], None] = {(work.group, work.format): None for work in counts}
    rows = []
    for group, format_ in groups:
        chosen = [(w, n) for w, n in counts.items() if (w.group, w.format) == (group, format_)]
        read = sum(work.bytes_read * count for work, count in chosen)
        times = [
            sum(count * _in_format(work, name, program, constants) for work, count in chosen)
            for name in (format_, *WEIGHT_FORMATS)
        ]
        rows.append((group, format_, f"{read / 1e6:,.1f}", *(f"{1e3 * t:.2f}" for t in times)))
    return rows


def _in_format(
    work: InstructionCost, name: str, program: DeviceProgram, constants: Constants | None
) -> float:
    read = work.bytes_read * tile_bytes(name) // tile_bytes(work.format)
    changed = dataclasses.replace(work, bytes_read=read, format=name)
    return seconds_by_work(program, constants)(changed)[0]


def _label(line: InstructionEstimate) -> str:
    if line.work is None:
        return _ONCE
    return " ".join(part for part in (line.work.name, line.work.group) if part)


def _cells(label: str, lines: list[InstructionEstimate], whole: float) -> tuple[str, ...]:
    seconds = sum(line.seconds for line in lines)
    work = [line.work for line in lines if line.work is not None]
    moved = sum(each.bytes_read + each.link_bytes for each in work)
    bounds: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        bounds[line.bound] += line.seconds
    return (
        label,
        f"{len(work):,}" if work else "",
        f"{moved / 1e6:,.1f}" if moved else "",
        f"{1e6 * seconds:,.0f}",
        f"{100 * seconds / whole:.1f} %",
        max(bounds, key=lambda name: bounds[name]),
    )
