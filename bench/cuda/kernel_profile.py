"""Where a step on a GPU goes: its kernels as CUPTI saw them, by part of the model and by name.

A kernel may start before the one before it has ended, and then waits for it inside: durations
overlap. So a kernel's own time is what it adds to the step: from the last end before it, or its
start where that is later, to its end. Own times and gaps together are the step. The tables of
``python -m bench bench-cuda --profile`` say what they come to.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from bench.cuda.rows import DECODE, DECODE_SHARE, BenchRow
from tilewright.cli.terminal.console import print_table
from tilewright.compiler.targets.interface.base import Executable
from tilewright.evaluate.measure.roofline import STATE, Work, product_groups
from tilewright.evaluate.measure.timing import OFFLINE, Job
from tilewright.evaluate.report.display import decimal, percent
from tilewright.evaluate.report.table import Table
from tilewright.evaluate.results.record import RANDOM_WEIGHTS, Ceilings
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.request import Request

if TYPE_CHECKING:
    from rich.console import Console

    from bench.cuda.measure import Bench

EMBEDDING, ATTENTION, NORM, CHOOSE, COPY = "embedding", "attention", "norm", "choose", "copy"
DEQUANTISE, PRODUCT, OTHER = "dequantise", "product", "other"

_PIECES = {
    COPY: ("memcpy", "memset"),
    EMBEDDING: ("embed",),
    ATTENTION: ("attend", "sdpa", "flash", "fmha", "rotate_and_store"),
    OTHER: ("swiglu",),
    NORM: ("rms_norm",),
    CHOOSE: ("_partial_kernel", "_final_kernel"),
    DEQUANTISE: ("_bf16_kernel", "_bfp8_kernel", "_bfp4_kernel"),
    PRODUCT: (
        *("gemv", "gemm", "wide_", "cut_", "joined_", "arrange", "nvjet", "cutlass"),
        *("leaves_", "dense_", "many_", "turned_"),
        *("linear_kernel", "expert_linear", "expert_sum", "router_"),
    ),
}
"""What a kernel's name contains, by part; the first that fits."""
_ALONG = ("shared_ff1_3", "shared_ff2")
"""Groups of products that may run along with others, in one launch."""
_SPLIT_K = "splitk"
"""What stands in the name of a kernel that adds up the pieces of the product before it."""
_MAX_NAME = 48
_FIGURES = ("launches", "own (us)", "of step", "durations (us)")
_PARTS = ("part", *_FIGURES, "read (MB)", "TB/s", "of reads")
_KERNELS = ("kernel", *_FIGURES)
_MOST_KERNELS = 20
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel or copy: its name, and when it ran, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Line:
    """A kernel or a part of the model in a step: launches, own time and durations, microseconds."""

    name: str
    launches: float
    own: float
    durations: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What a step spent where: means over ``num_steps`` steps, in microseconds.

    ``step``: from a step's first kernel to the next step's. ``idle``: no kernel ran.
    ``is_mapped``: products are told apart by tensor group; else all are one part.
    """

    num_steps: int
    step: float
    idle: float
    parts: tuple[Line, ...]
    kernels: tuple[Line, ...]
    is_mapped: bool


def profile_decode(
    executable: Executable, jobs: Sequence[Job], groups: Sequence[str], *, num_steps: int = 16
) -> StepProfile | None:
    """Decode steps of all jobs at once, behind their prompts: as many as the jobs have tokens for,
    and at most ``num_steps``.
    """
    wanted = min(job.sampling.max_tokens for job in jobs)
    num_steps = min(num_steps, wanted - _WARM_UP - 3)
    llm, requests = _started(executable, jobs)
    while not all(len(request.output) > _WARM_UP for request in requests):
        llm.step()

    def run() -> None:
        for _ in range(num_steps + 1):
            llm.step()

    launches = record_launches(run)
    _end(llm, requests)
    return profile_steps(launches, groups)


def profile_prompt(executable: Executable, job: Job, groups: Sequence[str]) -> StepProfile | None:
    """A prompt's first step, after one like it; it ends where the decode step begins."""
    _prompt_and_one_step(executable, job)
    launches = record_launches(lambda: _prompt_and_one_step(executable, job))
    return profile_steps(launches, groups, most=1)


def _prompt_and_one_step(executable: Executable, job: Job) -> None:
    llm, requests = _started(executable, [job])
    while len(requests[0].output) < 2:
        llm.step()
    _end(llm, requests)


def _started(executable: Executable, jobs: Sequence[Job]) -> tuple[EngineLoop, list[Request]]:
    llm = EngineLoop(executable, policy=OFFLINE)
    requests = [Request(index, job.prompt, job.sampling) for index, job in enumerate(jobs)]
    for request in requests:
        llm.add(request)
    return llm, requests


def _end(llm: EngineLoop, requests: Sequence[Request]) -> None:
    for request in requests:
        llm.cancel(request)


def record_launches(run: Callable[[], None]) -> list[Launch]:
    """What ran on the GPU meanwhile, in the order of starting; it waits for the GPU to end."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    # Captured graphs do not outlive CUPTI's teardown: "free(): invalid pointer" at the exit.
    os.environ["TEARDOWN_CUPTI"] = "0"
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    launches = [
        Launch(event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type == DeviceType.CUDA
    ]
    return sorted(launches, key=lambda each: each.start)


def profile_steps(
    launches: Sequence[Launch], groups: Sequence[str], *, most: int | None = None
) -> StepProfile | None:
    """The profile of equal steps that follow each other, each beginning with an embedding.

    What ran before the first and from the last one's beginning on is left out; None where no
    step is whole. ``groups``: the tensor groups of a step's products, in order. ``most``: steps
    to look at.
    """
    starts = [i for i, each in enumerate(launches) if part_of(each.name) == EMBEDDING]
    starts = starts[: None if most is None else most + 1]
    if len(starts) < 2:
        return None
    num_steps = len(starts) - 1
    parts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    idle, last_end, is_mapped = 0.0, launches[starts[0]].start, True
    for begin, end in pairwise(starts):
        step = launches[begin:end]
        named, is_step_mapped = assign_parts([each.name for each in step], groups)
        is_mapped = is_mapped and is_step_mapped
        for each, part in zip(step, named, strict=True):
            idle += max(0.0, each.start - last_end)
            own = max(0.0, each.end - max(each.start, last_end))
            last_end = max(last_end, each.end)
            for totals in (parts[part], kernels[short_name(each.name)]):
                totals[0] += 1
                totals[1] += own
                totals[2] += each.end - each.start
    idle += max(0.0, launches[starts[-1]].start - last_end)
    span = launches[starts[-1]].start - launches[starts[0]].start
    return StepProfile(
        num_steps,
        span / num_steps,
        idle / num_steps,
        _lines(parts, num_steps),
        _lines(kernels, num_steps),
        is_mapped,
    )


def assign_parts(names: Sequence[str], groups: Sequence[str]) -> tuple[list[str], bool]:
    """The part of every kernel of a step, and whether its products are as many as ``groups``.

    A product is one kernel, and the sum of its pieces behind it if it was cut. Those of an expert
    that all tokens share may be part of the others' launches.
    """
    parts: list[str] = []
    for name in names:
        is_sum = _SPLIT_K in name.lower() and "reduce" in name.lower()
        parts.append(f"+{PRODUCT}" if is_sum else part_of(name))
    alone = [group for group in groups if group not in _ALONG]
    if parts.count(PRODUCT) == len(alone):
        groups = alone
    is_mapped = parts.count(PRODUCT) == len(groups)
    remaining, last = iter(groups), PRODUCT
    for index, part in enumerate(parts):
        if part == PRODUCT and is_mapped:
            last = next(remaining)
        if part in (PRODUCT, f"+{PRODUCT}"):
            parts[index] = last
    return parts, is_mapped


def part_of(name: str) -> str:
    """Tell the part of a step that a kernel computes, by its name."""
    plain = _without_arguments(name).lower()
    found = (part for part, pieces in _PIECES.items() if any(each in plain for each in pieces))
    return next(found, OTHER)


def short_name(name: str) -> str:
    """A kernel's name without its namespaces and arguments, and without what is too long."""
    plain = _without_arguments(name).rpartition("::")[2]
    return plain if len(plain) <= _MAX_NAME else f"{plain[: _MAX_NAME - 3]}..."


def _without_arguments(name: str) -> str:
    """Cut off a return type and what stands in a template's or a function's brackets."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return plain if plain.startswith("Mem") else re.split(r"[<(]", plain, maxsplit=1)[0]


def _lines(totals: dict[str, list[float]], num_steps: int) -> tuple[Line, ...]:
    lines = [Line(name, *(value / num_steps for value in found)) for name, found in totals.items()]
    return tuple(sorted(lines, key=lambda line: -line.own))


def print_profile(screen: Console, made: Bench, row: BenchRow, ceilings: Ceilings) -> None:
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
    print_table(screen, title, Table.of(_PARTS, lines), numbers=True)
    notes = "own: what a kernel adds to the step; durations overlap, for a kernel starts early"
    if not found.is_mapped:
        notes += "; products are not told apart: they are more or fewer kernels than products"
    print_table(screen, "", Table.of(_KERNELS, kernel_rows(found), notes), numbers=True)


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
