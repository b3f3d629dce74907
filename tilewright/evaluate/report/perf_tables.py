"""Tables and cells for PERF.md's generated block, from results.

`perf_md` reads and writes the file. `precision_titles` makes titles for configurations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.evaluate.cases.cases import TABLE_GENERATED_TOKENS, TABLE_PROMPT_LENGTH
from tilewright.evaluate.report import board_tables
from tilewright.evaluate.report.display import cell_text, listed
from tilewright.evaluate.report.precision_titles import count_layer_rules, linked_file, titles_of
from tilewright.evaluate.report.table import Table
from tilewright.evaluate.results import row
from tilewright.evaluate.results.record import KINDS, Result
from tilewright.evaluate.results.row import KL, PAIRED, PEAK, POSITIONS, PRECISION, SPREAD
from tilewright.evaluate.results.selection import (
    BATCH_32,
    SHORT,
    ResultGroup,
    SpeedTable,
    context_lengths,
    group_results,
    is_board,
    is_placed,
    row_order,
    several_users,
    table_rows,
)

_WHO = (row.MODEL, row.DEVICE)
_NOISE = (row.SPEED_INTERVAL, SPREAD, row.TTFT_SPREAD)
_ORIGIN = (row.DATE, row.COMMIT, row.MACHINE, row.COMMAND)
_PERF_COLUMNS = (
    *(*_WHO, row.TOP1, row.TOP5, row.SPEED, row.TTFT),
    *(row.TOP1_INTERVAL, row.TOP5_INTERVAL, POSITIONS, KL, PAIRED, *_NOISE, PEAK, *_ORIGIN),
)
_LONG_COLUMNS = (*_WHO, PRECISION, row.SPEED, row.TTFT, *_NOISE, PEAK, *_ORIGIN)
_USER_TTFT = (row.FIRST_TTFT, row.MEDIAN_TTFT, row.LAST_TTFT)
_BATCH_COLUMNS = (
    *(*_WHO, PRECISION, row.SPEED, row.AVG_TTFT, row.TOTAL),
    *(*_USER_TTFT, *_NOISE, PEAK, *_ORIGIN),
)

_USERS_COLUMNS = (
    *(*_WHO, PRECISION, row.LENGTHS, row.SPEED, row.TOTAL, row.AVG_TTFT),
    *(*_NOISE, PEAK, *_ORIGIN),
)
SEVERAL_USERS = "Several users"

ORIGIN_LEGEND = f"""\
`{row.DATE}`, `{row.COMMIT}`, `{row.MACHINE}` and `{row.COMMAND}` are the origin. "-" is
unknown. {row.OTHER_RUN} marks rows with values from a different run than most rows of the device.
{row.CHANGED} marks rows with values from a commit with local changes (`-dirty`).
"""
"""Legend of the columns with the origin of a row."""

_LEGEND = f"""\
Generated from recorded results. Changes between the markers are lost.

`{POSITIONS}` are the predictions of top-1 and top-5, with 95 % Wilson intervals. `{KL}` is in nats.
`{PAIRED}` counts positions right only here (+) and only in the base (-), with the exact McNemar p.
`{SPREAD}` and `{row.TTFT_SPREAD}` are (max - min) / median. `{row.SPEED_INTERVAL}` is Student's t
over the repeats. `{PEAK}` is in units of 10^6 bytes.

{ORIGIN_LEGEND}"""
_CALIBRATED = f"""\
`{row.CALIBRATION}` is the method and the text of calibrated weights, empty for round to nearest.

"""
_SHORT = f"prefill {TABLE_PROMPT_LENGTH} tokens, {TABLE_GENERATED_TOKENS} generated"


@dataclass(frozen=True, slots=True)
class TablePlan:
    """A section to print: heading, introduction and table. The last two are optional."""

    level: int
    title: str
    intro: str = ""
    table: Table | None = None

    def render(self) -> str:
        """Render the section as Markdown: its heading, introduction and table."""
        table = self.table.markdown() if self.table else ""
        parts = [f"{'#' * self.level} {self.title}\n", self.intro and f"{self.intro}\n", table]
        return "\n".join(part for part in parts if part)


def render_results(results: Sequence[Result]) -> str:
    """Return PERF.md's generated block, without its markers.

    The newest result counts for each kind, model, device and configuration. Results of an older
    checkpoint or an older definition of a configuration are not printed. See `unplaced` for results
    without a table.
    """
    sections = "\n".join(plan.render() for plan in plan_tables(results))
    legend = _LEGEND + (_CALIBRATED if any(result.calibration for result in results) else "")
    return f"{legend}\n{sections or 'No results yet.'}".rstrip("\n") + "\n"


def plan_tables(results: Sequence[Result], *, has_surroundings: bool = True) -> list[TablePlan]:
    """Return every section in order. Different kinds of results never share a table.

    ``has_surroundings`` includes the numeric contracts and the environments.
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
    """Return the section for absent boards with their numeric contract."""
    if not results:
        return []
    table = board_tables.board_table(results)
    found = TablePlan(1, board_tables.BOARDS_TITLE, board_tables.INTRO, table)
    contract = _contract_plans(
        [ResultGroup((replace(r, target="Tenstorrent boards"),)) for r in results]
    )
    return [found, *contract]


def _case_plans(groups: list[ResultGroup]) -> list[TablePlan]:
    plans = []
    for name in ("performance", "accuracy"):
        intro = f"Precision `{name}`. **Batch 1 (per DP group), {_SHORT}.**"
        named = [group for group in groups if name in group.names]
        plans.append(_perf_plan(named, title=name.capitalize(), intro=intro))
    for k in reversed(context_lengths(groups)):  # longest first
        intro = f"**Batch 1, prefill {k * 1024} tokens, {TABLE_GENERATED_TOKENS} generated.**"
        title = f"Long-context ({k}K Tokens)"
        plans.append(_speed_plan(groups, k, columns=_LONG_COLUMNS, title=title, intro=intro))
    intro = (
        f"**Batch 32 (per DP group), {_SHORT}.** The average TTFT is the prefill of all users, one "
        "after another, divided by 32."
    )
    title = "Short-Context, Batch-32"
    plans.append(_speed_plan(groups, BATCH_32, columns=_BATCH_COLUMNS, title=title, intro=intro))
    intro = (
        f"**Users (per DP group) x tokens of each one's prompt, {TABLE_GENERATED_TOKENS} "
        "generated.** The average TTFT is the prefill of all users divided by their number."
    )
    tables, columns = several_users(groups), _USERS_COLUMNS
    plans.append(_speed_plan(groups, *tables, columns=columns, title=SEVERAL_USERS, intro=intro))
    return [plan for plan in plans if plan is not None]


def _perf_plan(groups: list[ResultGroup], *, title: str, intro: str) -> TablePlan | None:
    """Return a table with accuracy and batch-1 speed, or None if empty."""
    printed = [group for group in groups if _has_perf_row(group)]
    rows = table_rows([(group, group.speed(SHORT), group.accuracy_result) for group in printed])
    notes = [
        f"On {found.device}, {found.model}: {listed(group.names)} have equal results."
        for group, found in zip(printed, rows, strict=True)
        if len(group.names) > 1
    ]
    return TablePlan(2, title, intro, row.table_of(_PERF_COLUMNS, rows, *notes)) if rows else None


def _has_perf_row(group: ResultGroup) -> bool:
    return group.speed(SHORT) is not None or group.accuracy_result is not None


def _speed_plan(
    groups: list[ResultGroup], *tables: SpeedTable, columns: Sequence[str], title: str, intro: str
) -> TablePlan | None:
    """Return a table with the groups' speeds of some tables, or None if empty."""
    figures = [(g, found, None) for g in groups for each in tables if (found := g.speed(each))]
    rows = table_rows(figures)
    return TablePlan(2, title, intro, row.table_of(columns, rows)) if rows else None


def _contract_plans(groups: list[ResultGroup]) -> list[TablePlan]:
    """Return a table per target: requested and effective arithmetic."""
    lines: dict[str, set[tuple[str, ...]]] = {}
    for group in groups:
        for result in group.results:
            for entry in result.contract:
                texts = entry.field, entry.requested, entry.status, entry.effective
                lines.setdefault(result.target, set()).add(tuple(map(cell_text, texts)))
    columns = ("Field", "Requested", "Status", "Effective")
    return [
        TablePlan(2, f"Numeric contract ({target})", "", Table.of(columns, sorted(lines[target])))
        for target in sorted(lines)
    ]


def _environment_plan(groups: list[ResultGroup]) -> TablePlan:
    rows = set()
    for group in groups:
        for result in group.results:
            versions = ", ".join(f"{name} {v}" for name, v in sorted(result.versions.items()))
            texts = result.device, result.device_detail, result.commit or "", versions
            rows.add(tuple(map(cell_text, texts)))
    columns = (row.DEVICE, "Detail", "Commit", "Versions")
    return TablePlan(2, "Environment", "", Table.of(columns, sorted(rows)))


def _precision_plans(groups: list[ResultGroup]) -> list[TablePlan]:
    """Return a section per heading.

    A group has its row in its first name's section. The sections of its other headings refer
    to it.
    """
    printed = [group for group in groups if _has_perf_row(group)]
    titles = titles_of([result for group in printed for result in group.results])
    sections: dict[str, list[tuple[ResultGroup, Result]]] = {}
    for group in printed:
        for result in sorted(group.results, key=lambda result: result.precision_name):
            sections.setdefault(titles[result.heading], []).append((group, result))
    first_names = {
        title: min(result.precision_name for _, result in members)
        for title, members in sections.items()
    }
    return [
        _precision_plan(title, sections[title], titles)
        for title in sorted(sections, key=lambda title: first_names[title])
    ]


def _precision_plan(
    title: str, members: Sequence[tuple[ResultGroup, Result]], titles: Mapping[str, str]
) -> TablePlan:
    """Return a title's section. Each result is paired with its group."""
    intro = f"Precision {listed(sorted({result.precision_name for _, result in members}))}."
    if num_rules := count_layer_rules(members[0][1].heading):
        intro += f" {num_rules} layer rule{'s' if num_rules > 1 else ''}"
        path = linked_file(title)
        intro += "." if path is None else f": [{path}]({path})."
    groups = list({id(group): group for group, _ in members}.values())
    own = [group for group in groups if titles[group.heading] == title]
    sentences = tuple(
        _visitor_sentence(group, [r for r in group.results if titles[r.heading] == title])
        for group in groups
        if titles[group.heading] != title
    )
    plan = _perf_plan(sorted(own, key=row_order), title=title, intro=intro)
    if plan is None or plan.table is None:
        return TablePlan(2, title, "\n\n".join((intro, *sentences)))
    return replace(plan, table=replace(plan.table, notes=plan.table.notes + sentences))


def _visitor_sentence(group: ResultGroup, visitors: Sequence[Result]) -> str:
    """Return a sentence about results with a row in another section."""
    names = sorted({result.precision_name for result in visitors})
    verb = "shares" if len(names) == 1 else "share"
    return (
        f"On {row.device_text(group.any)}, {row.model_text(group.any)}, {listed(names)} {verb} "
        f"the numbers and the row of `{group.names[0]}`."
    )
