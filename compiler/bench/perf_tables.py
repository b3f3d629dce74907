"""PERF.md's generated block: which results stand in which table, and what each cell says.

Knows results and the names of columns; reading, writing and markers are perf_md's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from compiler.bench.cases import TABLE_GENERATED_TOKENS, TABLE_PROMPT_LENGTH
from compiler.bench.markdown import format_table
from compiler.bench.perf_md import (
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
from compiler.bench.record import KINDS, RANDOM_WEIGHTS, Accuracy, Kind, Result
from compiler.bench.selection import (
    Group,
    context_k,
    group_results,
    is_batch_32,
    is_placed,
    is_short,
    row_order,
)

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
        table = format_table(self.columns, self.rows) if self.columns else ""
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


def plan_tables(results: Sequence[Result]) -> list[TablePlan]:
    """Every section to print, in order. Kinds of results never share a table."""
    plans: list[TablePlan] = []
    for kind in KINDS:
        groups = group_results([r for r in results if r.kind == kind and is_placed(r)])
        if groups:
            if kind != "measured":
                plans.append(TablePlan(1, f"{kind.capitalize()} results"))
            plans += _plan_kind(groups, kind=kind)
    return plans


def _plan_kind(groups: list[Group], *, kind: Kind) -> list[TablePlan]:
    plans = []
    for name in ("performance", "accuracy"):
        intro = f"Precision `{name}`. **Batch 1 (per DP group), {_SHORT}.**"
        named = [group for group in groups if name in group.names]
        if plan := _perf_plan(named, title=name.capitalize(), intro=intro):
            plans.append(plan)
    plans += _long_plans(groups)
    plans += _batch_plans(groups)
    plans += _contract_plans(groups)
    plans.append(_environment_plan(groups))
    precisions = _precision_plans(groups)
    if precisions and kind == "measured":
        plans.append(TablePlan(1, "Model precision and math fidelity"))
    return plans + precisions


def _perf_plan(groups: list[Group], *, title: str, intro: str) -> TablePlan | None:
    """A table with accuracy and batch-1 speed; None without a row."""
    rows = [row for group in groups if (row := _perf_row(group))]
    notes = [
        f"On {_device(group.any)}, {_model(group.any)}: {_listed(group.names)} come to the same."
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
    percent = intervals = ("", "")
    evidence = ("", "", "")
    if accuracy:
        n = accuracy.num_positions
        percent = _decimal(100 * accuracy.num_top1 / n), _decimal(100 * accuracy.num_top5 / n)
        intervals = _interval(accuracy.top1_interval), _interval(accuracy.top5_interval)
        kl = "" if accuracy.kl_mean is None else f"{accuracy.kl_mean:.3g}"
        evidence = str(n), kl, _paired(accuracy)
    return (
        _model(group.any),
        _device(group.any),
        *percent,
        _decimal(found.decode_tsu if found else None),
        _decimal(found.ttft_ms if found else None),
        *intervals,
        *evidence,
        *_tail(found),
    )


def _long_plans(groups: list[Group]) -> list[TablePlan]:
    """Long-context tables, the longest first."""
    lengths = {k for group in groups for result in group.results if (k := context_k(result))}
    plans = []
    for k in sorted(lengths, reverse=True):
        rows = tuple(
            (*_who(group), _decimal(found.decode_tsu), _decimal(found.ttft_ms), *_tail(found))
            for group in groups
            if (found := group.speed(partial(_has_context, k=k)))
        )
        intro = f"**Batch 1, prefill {k * 1024} tokens, {TABLE_GENERATED_TOKENS} generated.**"
        plans.append(TablePlan(2, f"Long-context ({k}K Tokens)", intro, _LONG_COLUMNS, rows))
    return plans


def _has_context(result: Result, *, k: int) -> bool:
    return context_k(result) == k


def _batch_plans(groups: list[Group]) -> list[TablePlan]:
    rows = tuple(
        (
            *_who(group),
            _decimal(found.decode_tsu),
            _decimal(found.ttft_ms),
            _decimal(found.tps),
            _decimal(found.ttft_first_ms),
            _decimal(found.ttft_median_ms),
            _decimal(found.ttft_last_ms),
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
                lines.setdefault(result.target, set()).add(tuple(map(_cell, texts)))
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
            rows.add(tuple(map(_cell, texts)))
    columns = (DEVICE, "Detail", "Commit", "Versions")
    return TablePlan(2, "Environment", "", columns, tuple(sorted(rows)))


def _precision_plans(groups: list[Group]) -> list[TablePlan]:
    """One section a heading; a configuration equal to another stands in the other's section."""
    sections: dict[str, list[Group]] = {}
    for group in sorted(groups, key=lambda group: group.names[0]):
        sections.setdefault(group.heading, []).append(group)
    plans = []
    for heading, members in sections.items():
        members.sort(key=row_order)
        names = sorted({name for group in members for name in group.names})
        plan = _perf_plan(members, title=heading, intro=f"Precision {_listed(names)}.")
        if plan:
            # No configuration's own heading is lost by standing in the section of another.
            own = {(r.precision_name, r.heading) for group in members for r in group.results}
            lost = sorted((name, line) for name, line in own if line != heading)
            notes = tuple(f"`{name}`: {line}" for name, line in lost)
            plans.append(replace(plan, notes=plan.notes + notes))
    return plans


def _who(group: Group) -> tuple[str, str, str]:
    return _model(group.any), _device(group.any), ", ".join(group.names)


def _model(result: Result) -> str:
    return f"{result.model} {RANDOM_WEIGHTS}" if result.weights == "random" else result.model


def _device(result: Result) -> str:
    """A board's name says its mesh; elsewhere a mesh of more than one device is named."""
    is_board = result.target.startswith("tenstorrent")
    mesh = "" if is_board or result.mesh == "1x1" else f" ({result.mesh})"
    return f"{result.device}{mesh}" + (f" (DP={result.dp})" if result.dp > 1 else "")


def _tail(result: Result | None) -> tuple[str, str]:
    """Spread in percent, peak memory in 10^6 bytes."""
    spread = result.spread if result else None
    peak = result.peak_memory_bytes if result else None
    return (
        "" if spread is None else _decimal(100 * spread),
        "" if peak is None else f"{peak / 1e6:.0f}",
    )


def _decimal(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _interval(interval: tuple[float, float]) -> str:
    return "-".join(_decimal(100 * bound) for bound in interval)


def _paired(accuracy: Accuracy) -> str:
    paired = accuracy.paired
    return f"{_cell(paired.base)} +{paired.c} -{paired.b} p={paired.p:.2g}" if paired else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    """Free text as a cell: one line, no bars."""
    return " ".join(text.replace("|", "/").split())
