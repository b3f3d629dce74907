"""The profile tables of ``demo/bench_cuda.py --profile``: a step by part of the model and by
kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.cuda.kernel_profile import (
    ATTENTION,
    EMBEDDING,
    OTHER,
    PRODUCT,
    Line,
    StepProfile,
    profile_decode,
    profile_prompt,
)
from bench.cuda.measure import Bench
from bench.cuda.rows import DECODE, DECODE_SHARE, Row
from tilewright.compiler.bench.display import decimal, percent
from tilewright.compiler.bench.record import RANDOM_WEIGHTS, Ceilings
from tilewright.compiler.bench.roofline import STATE, Work, product_groups
from tilewright.compiler.commands.console import print_table

if TYPE_CHECKING:
    from rich.console import Console

_PARTS = (
    *("part", "launches", "own (us)", "of step", "durations (us)", "read (MB)", "TB/s"),
    "of reads",
)
_KERNELS = ("kernel", "launches", "own (us)", "of step", "durations (us)")
_MOST_KERNELS = 20


def print_profile(screen: Console, made: Bench, row: Row, ceilings: Ceilings) -> None:
    """Profile the row's decode step, or its prompt, and print it."""
    groups = product_groups(made.compiled.graph())
    executable, jobs = made.compiled.executable, made.jobs(row)
    is_decode = row.metric in (DECODE, DECODE_SHARE)
    prompt, step = made.works(row)
    plain = made.step_seconds(row)[is_decode]
    if is_decode:
        found = profile_decode(executable, jobs, groups)
    else:
        found = profile_prompt(executable, jobs[0], groups)
    if found is None:
        screen.print(f"{row.name}: the profiler saw no whole step", style="yellow")
        return
    what = "decode step" if is_decode else f"prompt of {row.prompt_length:,} tokens"
    title = f"{row.name}: {what} {RANDOM_WEIGHTS}, under the profiler {found.step:,.1f} us"
    title += "" if plain is None else f", without {1e6 * plain:,.1f}"
    lines = part_rows(found, step if is_decode else prompt, ceilings)
    print_table(screen, title, _PARTS, lines, numbers=True)
    print_table(screen, "", _KERNELS, kernel_rows(found), numbers=True)
    notes = "own: what a kernel adds to the step; durations overlap, for a kernel starts early"
    if not found.is_mapped:
        notes += "; products are not told apart: they are more or fewer kernels than products"
    screen.print(notes, style="dim", soft_wrap=True)


def part_rows(found: StepProfile, work: Work, ceilings: Ceilings) -> list[tuple[str, ...]]:
    """Cells of the table by part, gaps and the whole step last."""
    rows = []
    for line in found.parts:
        num_bytes = _bytes_of(line.name, work)
        rows.append((*_cells(line, found.step), *_rate(num_bytes, line.own, ceilings)))
    if found.idle:
        rows.append((*_cells(Line("gaps", 0, found.idle, 0), found.step), "", "", ""))
    launches = sum(line.launches for line in found.parts)
    durations = sum(line.durations for line in found.parts)
    whole = Line("step", launches, found.step, durations)
    rows.append((*_cells(whole, found.step), *_rate(work.num_bytes, found.step, ceilings)))
    return rows


def _bytes_of(part: str, work: Work) -> float:
    """What the kernels of a part read: caches, weights of a group, or all products' weights."""
    parts = work.bytes_by_part
    if part == PRODUCT:
        rest = (EMBEDDING, OTHER, STATE)
        return sum(size for name, size in parts.items() if name not in rest)
    if part == OTHER:  # norms' weights, which other kernels read
        return 0.0
    return parts.get(STATE if part == ATTENTION else part, 0.0)


def kernel_rows(found: StepProfile) -> list[tuple[str, ...]]:
    """Cells of the table by kernel, the longest first."""
    return [_cells(line, found.step) for line in found.kernels[:_MOST_KERNELS]]


def _cells(line: Line, step: float) -> tuple[str, ...]:
    share = f"{percent(line.own / step)} %" if step else "-"
    own, durations = (decimal(each, grouped=True) for each in (line.own, line.durations))
    return line.name, f"{line.launches:g}", own, share, durations


def _rate(num_bytes: float, microseconds: float, ceilings: Ceilings) -> tuple[str, str, str]:
    """Bytes, their rate, and its share of the read bandwidth; blank where little is read."""
    if num_bytes < 1e6 or not microseconds:
        return "", "", ""
    rate = num_bytes / (1e-6 * microseconds)
    share = f"{percent(rate / ceilings.bytes_per_s)} %"
    return decimal(num_bytes / 1e6, grouped=True), decimal(rate / 1e12, 2), share
