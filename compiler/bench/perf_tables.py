"""PERF.md's generated block: which results stand in which table, and what each cell says.

Knows results and the names of columns; reading, writing and markers are perf_md's, how a section's
title names a configuration precision_titles'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tilewright.compiler.bench import board_tables
from tilewright.compiler.bench.cases import TABLE_GENERATED_TOKENS, TABLE_PROMPT_LENGTH
from tilewright.compiler.bench.perf_md import (
    AVG_TTFT,
    DEVICE,
    FIRST_TTFT,
    KL,
    LAST_TTFT,
    MEDIAN_TTFT,
    MODEL,
    PAIRED,
    PEAK,
    POSITIONS,
    PRECISION,
    SPEED,
    SPREAD,
    TOP1,
    TOP1_INTERVAL,
    TOP5,
    TOP5_INTERVAL,
    TOTAL,
    TTFT,
)
from tilewright.compiler.bench.precision_titles import count_layer_rules, linked_file, titles_of
from tilewright.compiler.bench.published import published_row
from tilewright.compiler.bench.record import KINDS, RANDOM_WEIGHTS, Accuracy, Result
from tilewright.compiler.bench.selection import (
    Group,
    context_k,
    group_results,
    has_context,
    is_batch_32,
    is_board,
    is_placed,
    is_short,
    row_order,
)
from tilewright.compiler.bench.table import Table
from tilewright.compiler.devices import BOARDS

_PERF_COLUMNS = (MODEL, DEVICE, TOP1, TOP5, SPEED, TTFT)
_PERF_EXTRA = (TOP1_INTERVAL, TOP5_INTERVAL, POSITIONS, KL, PAIRED, SPREAD, PEAK)
_LONG_COLUMNS = (MODEL, DEVICE, PRECISION, SPEED, TTFT, SPREAD, PEAK)
_USER_TTFT = (FIRST_TTFT, MEDIAN_TTFT, LAST_TTFT)
_BATCH_COLUMNS = (MODEL, DEVICE, PRECISION, SPEED, AVG_TTFT, TOTAL, *_USER_TTFT, SPREAD, PEAK)

_LEGEND = f"""\
Generated from recorded results; what stands between the markers is replaced the next time.

Top-1 and Top-5: the share of teacher-forced positions (`{POSITIONS}`) where the first guess is the
fp32 reference's first, or among its five, with 95 % Wilson intervals. `{KL}`: mean divergence from
the reference in nats. `{PAIRED}`: positions that only this configuration (+) and only the base (-)
got right, with the exact McNemar p. Speed and TTFT: medians over repeats; `{SPREAD}`: (max - min) /
median of the speed. `{PEAK}`: 10^6 bytes.
"""
_SHORT = f"prefill {TABLE_PROMPT_LENGTH} tokens, {TABLE_GENERATED_TOKENS} generated"


@dataclass(frozen=True, slots=True)
class TablePlan:
    """One section to print: heading, introduction, table (none without columns) and notes."""

    level: int
    title: str
    intro: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def render(self) -> str:
        """The section's Markdown."""
        table = Table.of(self.columns, self.rows).markdown() if self.columns else ""
        notes = "".join(f"- {note}\n" for note in self.notes)
        parts = [f"{'#' * self.level} {self.title}\n", self.intro and f"{self.intro}\n", table]
        return "\n".join(part for part in [*parts, notes] if part)


def render_results(results: Sequence[Result]) -> str:
    """The generated block of PERF.md, without its markers.

    Of one kind, model, device and configuration the newest result counts, and results of an older
    checkpoint or an older definition of a configuration are not printed at all; see `unplaced` for
    those that belong to no table.
    """
    sections = "\n".join(plan.render() for plan in plan_tables(results))
    return f"{_LEGEND}\n{sections or 'No results yet.'}".rstrip("\n") + "\n"


def plan_tables(results: Sequence[Result], *, has_surroundings: bool = True) -> list[TablePlan]:
    """Every section to print, in order. Kinds of results never share a table.

    ``has_surroundings``: with the numeric contracts and the environments.
    """
    plans: list[TablePlan] = []
    placed = [result for result in results if is_placed(result)]
    for kind in KINDS:
        groups = group_results([r for r in placed if r.kind == kind and not is_board(r)])
        if groups:
            if kind != "measured":
                plans.append(TablePlan(1, f"{kind.capitalize()} results"))
            plans += _case_plans(groups)
            if has_surroundings:
                plans += [*_contract_plans(groups), _environment_plan(groups)]
            precisions = _precision_plans(groups)
            if precisions and kind == "measured":
                plans.append(TablePlan(1, "Model precision and math fidelity"))
            plans += precisions
    return plans + _board_plans([result for result in placed if is_board(result)])


def _board_plans(results: Sequence[Result]) -> list[TablePlan]:
    """The section of boards that were not there, and what they make of configurations."""
    if not results:
        return []

    def cells_of(group: Group) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return _who(group), _accuracy_cells(group)

    rows = board_tables.board_rows(results, published_row, cells_of)
    columns = board_tables.COLUMNS
    found = TablePlan(1, board_tables.BOARDS_TITLE, board_tables.INTRO, columns, tuple(rows))
    contract = _contract_plans([Group((replace(r, target="Tenstorrent boards"),)) for r in results])
    return [found, *contract]


def _case_plans(groups: list[Group]) -> list[TablePlan]:
    plans = []
    for name in ("performance", "accuracy"):
        intro = f"Precision `{name}`. **Batch 1 (per DP group), {_SHORT}.**"
        named = [group for group in groups if name in group.names]
        if plan := _perf_plan(named, title=name.capitalize(), intro=intro):
            plans.append(plan)
    return [*plans, *_long_plans(groups), *_batch_plans(groups)]


def _perf_plan(groups: list[Group], *, title: str, intro: str) -> TablePlan | None:
    """A table with accuracy and batch-1 speed; None without a row."""
    rows = [row for group in groups if (row := _perf_row(group))]
    notes = [
        f"On {_device(group.any)}, {_model(group.any)}: {listed(group.names)} come to the same."
        for group in groups
        if len(group.names) > 1 and _perf_row(group)
    ]
    if not rows:
        return None
    columns = _PERF_COLUMNS + _PERF_EXTRA
    return TablePlan(2, title, intro, columns, tuple(rows), tuple(notes))


def _perf_row(group: Group) -> tuple[str, ...] | None:
    found, accuracy = group.speed(is_short), group.accuracy
    if found is None and accuracy is None:
        return None
    top1, top5, top1_interval, *evidence = _accuracy_cells(group)
    percent = top1, top5
    top5_interval = interval_text(accuracy.top5_interval) if accuracy else ""
    intervals = top1_interval, top5_interval
    return (
        _model(group.any),
        _device(group.any),
        *percent,
        decimal(found.decode_tsu if found else None),
        decimal(found.ttft_ms if found else None),
        *intervals,
        *evidence,
        *_tail(found),
    )


def _accuracy_cells(group: Group) -> tuple[str, str, str, str, str, str]:
    """Top-1, top-5, the interval of top-1, positions, KL, the comparison with the base."""
    accuracy = group.accuracy
    if accuracy is None:
        return ("",) * 6
    n = accuracy.num_positions
    return (
        decimal(100 * accuracy.num_top1 / n),
        decimal(100 * accuracy.num_top5 / n),
        interval_text(accuracy.top1_interval),
        str(n),
        "" if accuracy.kl_mean is None else f"{accuracy.kl_mean:.3g}",
        paired_text(accuracy),
    )


def _long_plans(groups: list[Group]) -> list[TablePlan]:
    """Long-context tables, the longest first."""
    lengths = {k for group in groups for result in group.results if (k := context_k(result))}
    plans = []
    for k in sorted(lengths, reverse=True):
        rows = tuple(
            (*_who(group), decimal(found.decode_tsu), decimal(found.ttft_ms), *_tail(found))
            for group in groups
            if (found := group.speed(partial(has_context, k=k)))
        )
        intro = f"**Batch 1, prefill {k * 1024} tokens, {TABLE_GENERATED_TOKENS} generated.**"
        plans.append(TablePlan(2, f"Long-context ({k}K Tokens)", intro, _LONG_COLUMNS, rows))
    return plans


def _batch_plans(groups: list[Group]) -> list[TablePlan]:
    rows = tuple(
        (
            *_who(group),
            decimal(found.decode_tsu),
            decimal(found.ttft_ms),
            decimal(found.tps),
            decimal(found.ttft_first_ms),
            decimal(found.ttft_median_ms),
            decimal(found.ttft_last_ms),
            *_tail(found),
        )
        for group in groups
        if (found := group.speed(is_batch_32))
    )
    intro = (
        f"**Batch 32 (per DP group), {_SHORT}.** The average TTFT is the prefill of all users, one "
        "after another, divided by 32."
    )
    return [TablePlan(2, "Short-Context, Batch-32", intro, _BATCH_COLUMNS, rows)] if rows else []


def _contract_plans(groups: list[Group]) -> list[TablePlan]:
    """One table a target: what its results asked for, and what the arithmetic really was."""
    lines: dict[str, set[tuple[str, ...]]] = {}
    for group in groups:
        for result in group.results:
            for entry in result.contract:
                texts = entry.field, entry.requested, entry.status, entry.effective
                lines.setdefault(result.target, set()).add(tuple(map(cell_text, texts)))
    columns = ("Field", "Requested", "Status", "Effective")
    return [
        TablePlan(2, f"Numeric contract ({target})", "", columns, tuple(sorted(lines[target])))
        for target in sorted(lines)
    ]


def _environment_plan(groups: list[Group]) -> TablePlan:
    rows = set()
    for group in groups:
        for result in group.results:
            versions = ", ".join(f"{name} {v}" for name, v in sorted(result.versions.items()))
            texts = result.device, result.device_detail, result.commit or "", versions
            rows.add(tuple(map(cell_text, texts)))
    columns = (DEVICE, "Detail", "Commit", "Versions")
    return TablePlan(2, "Environment", "", columns, tuple(sorted(rows)))


def _precision_plans(groups: list[Group]) -> list[TablePlan]:
    """One section a heading.

    A group has its row in the section of its first name; a section of its other headings says so.
    """
    printed = [group for group in groups if _perf_row(group)]
    titles = titles_of([result for group in printed for result in group.results])
    sections: dict[str, _PrecisionSection] = {}
    for group in printed:
        for result in sorted(group.results, key=lambda result: result.precision_name):
            title = titles[result.heading]
            section = sections.setdefault(title, _PrecisionSection(title, result.heading))
            section.names.add(result.precision_name)
            members = section.groups if titles[group.heading] == title else section.visitors
            if group not in members:
                members.append(group)
    return [each.plan(titles) for each in sorted(sections.values(), key=lambda s: min(s.names))]


@dataclass(slots=True)
class _PrecisionSection:
    """A section being filled: ``groups`` have their row here, ``visitors`` elsewhere."""

    title: str
    heading: str
    names: set[str] = field(default_factory=set)
    groups: list[Group] = field(default_factory=list)
    visitors: list[Group] = field(default_factory=list)

    def plan(self, titles: Mapping[str, str]) -> TablePlan:
        intro = f"Precision {listed(sorted(self.names))}."
        if num_rules := count_layer_rules(self.heading):
            intro += f" {num_rules} layer rule{'s' if num_rules > 1 else ''}"
            path = linked_file(self.title)
            intro += "." if path is None else f": [{path}]({path})."
        sentences = tuple(self._sentence(group, titles) for group in self.visitors)
        plan = _perf_plan(sorted(self.groups, key=row_order), title=self.title, intro=intro)
        if plan is None:
            return TablePlan(2, self.title, "\n\n".join((intro, *sentences)))
        return replace(plan, notes=plan.notes + sentences)

    def _sentence(self, group: Group, titles: Mapping[str, str]) -> str:
        names = {r.precision_name for r in group.results if titles[r.heading] == self.title}
        come, stand = ("comes", "stands") if len(names) == 1 else ("come", "stand")
        return (
            f"On {_device(group.any)}, {_model(group.any)}, {listed(sorted(names))} {come} to the "
            f"same numbers as `{group.names[0]}` and {stand} in its row."
        )


def _who(group: Group) -> tuple[str, str, str]:
    return _model(group.any), _device(group.any), ", ".join(group.names)


def _model(result: Result) -> str:
    return f"{result.model} {RANDOM_WEIGHTS}" if result.weights == "random" else result.model


def _device(result: Result) -> str:
    """A board's name says its mesh; elsewhere a mesh of more than one device is named."""
    mesh = "" if result.target in BOARDS or result.mesh == "1x1" else f" ({result.mesh})"
    return f"{result.device}{mesh}" + (f" (DP={result.dp})" if result.dp > 1 else "")


def _tail(result: Result | None) -> tuple[str, str]:
    """Spread in percent, peak memory in 10^6 bytes."""
    spread = result.spread if result else None
    peak = result.peak_memory_bytes if result else None
    return (
        "" if spread is None else decimal(100 * spread),
        "" if peak is None else f"{peak / 1e6:.0f}",
    )


def decimal(value: float | None) -> str:
    """A figure as tables have it; blank where there is none."""
    return "" if value is None else f"{value:.1f}"


def interval_text(interval: tuple[float, float]) -> str:
    """An interval of fractions, in percent."""
    return "-".join(decimal(100 * bound) for bound in interval)


def paired_text(accuracy: Accuracy) -> str:
    """The comparison with the base: positions that only this got right, that only the base did."""
    paired = accuracy.paired
    return f"{cell_text(paired.base)} +{paired.c} -{paired.b} p={paired.p:.2g}" if paired else ""


def listed(names: Iterable[str]) -> str:
    """Names in a sentence."""
    return ", ".join(f"`{name}`" for name in names)


def cell_text(text: str) -> str:
    """Free text as a cell: one line, no bars."""
    return " ".join(text.replace("|", "/").split())
