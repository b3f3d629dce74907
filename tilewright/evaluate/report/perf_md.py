"""Reads and writes PERF.md: its sections, its typed rows, and the search for a row.

Text around a generated block is unchanged. `perf_tables` makes the rows.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.report import markdown
from tilewright.evaluate.results.record import HEADING_FORM, KINDS, RANDOM_WEIGHTS, Kind, is_heading
from tilewright.evaluate.results.row import (
    AVG_TTFT,
    CALIBRATION,
    DEVICE,
    FIRST_TTFT,
    KL,
    LAST_TTFT,
    MEDIAN_TTFT,
    MODEL,
    PEAK,
    POSITIONS,
    PRECISION,
    SPEED,
    SPREAD,
    TOP1,
    TOP5,
    TOTAL,
    TTFT,
    TTFT_SPREAD,
)
from tilewright.utils.files import read_text, write_file

SectionKind = Literal[
    "performance", "accuracy", "long_context", "batch_32", "precision", "boards", "other"
]

EMULATED_TOP1, EMULATED_TOP5 = "Emulated top-1 (%)", "Emulated top-5 (%)"
PREDICTED_SPEED, PREDICTED_TTFT = "Predicted speed (t/s/u)", "Predicted TTFT (ms)"
PUBLISHED_TOP1, PUBLISHED_SPEED = "Published top-1 (%)", "Published speed (t/s/u)"
PUBLISHED_TTFT = "Published TTFT (ms)"

BOARDS_TITLE = "Tenstorrent (emulated accuracy, predicted speed)"
"""Title of the section for absent boards. Other sections exclude their values."""

_BOARD_NUMBERS = {EMULATED_TOP1, EMULATED_TOP5, PREDICTED_SPEED, PREDICTED_TTFT}
_BOARD_NUMBERS |= {PUBLISHED_TOP1, PUBLISHED_SPEED, PUBLISHED_TTFT}

_PERCENT = {TOP1, TOP5, EMULATED_TOP1, EMULATED_TOP5, PUBLISHED_TOP1}
_NUMERIC = _BOARD_NUMBERS | {TOP1, TOP5, SPEED, TTFT, AVG_TTFT, TOTAL, POSITIONS, KL, SPREAD, PEAK}
_NUMERIC |= {FIRST_TTFT, MEDIAN_TTFT, LAST_TTFT, TTFT_SPREAD}

_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")
_LONG_CONTEXT = re.compile(r"long-context \(([1-9][0-9]{0,5})k tokens\)")
_SUFFIX = re.compile(r"DP=([1-9][0-9]{0,5})|([1-9][0-9]{0,3}x[1-9][0-9]{0,3})")

KIND_TITLES: Mapping[str, Kind] = {
    **{f"{kind} results": kind for kind in KINDS if kind != "measured"},
    BOARDS_TITLE.lower(): "predicted",
}
"""Level-1 titles (lower case) of sections without measured values."""

_MODEL_NAMES = (
    ("Llama3.2-1B", "Llama-3.2-1B", "Llama-3.2-1B-Instruct"),
    ("Llama3.2-3B", "Llama-3.2-3B", "Llama-3.2-3B-Instruct"),
    ("Llama3.1-8B", "Llama-3.1-8B", "Llama-3.1-8B-Instruct", "Meta-Llama-3.1-8B-Instruct"),
    ("Llama3.2-11B", "Llama-3.2-11B", "Llama-3.2-11B-Vision", "Llama-3.2-11B-Vision-Instruct"),
    ("Llama3.1-70B", "Llama-3.1-70B", "Llama-3.1-70B-Instruct", "Meta-Llama-3.1-70B-Instruct"),
    ("Llama3.2-90B", "Llama-3.2-90B", "Llama-3.2-90B-Vision", "Llama-3.2-90B-Vision-Instruct"),
    ("Qwen2.5-7B", "Qwen2.5-7B-Instruct"),
    ("Qwen2.5-72B", "Qwen2.5-72B-Instruct"),
    ("Phi3.5-mini", "Phi-3.5-mini", "Phi-3.5-mini-instruct"),
    ("Phi-3-mini-128k-instruct", "Phi-3-mini-128k"),
    ("SmolLM2-135M", "SmolLM2-135M-Instruct"),
)
_DEVICE_NAMES = (("TG", "Galaxy"), ("CPU", "cpu"))
_MODELS = {name: names[0] for names in _MODEL_NAMES for name in names}
_DEVICES = {name: names[0] for names in _DEVICE_NAMES for name in names}


@dataclass(frozen=True, slots=True)
class PerfRow:
    """A performance table row. None: a blank cell.

    Attributes:
        model, device: printed names without the marks of the next three fields.
        random: whether the weights are random.
        dp: data-parallel replicas.
        mesh: a replica's devices, if printed.
        precision: the column Precision's cell. None without the column.
        calibration: the column Calibration's cell, empty for round to nearest.
        top1, top5: percent, emulated in a section of boards.
        speed: tokens per second and user, predicted in a section of boards.
        ttft: ms, predicted in a section of boards, the average in a batch.
        cells: every cell by its column, also of unknown columns.
        line: line in the file.
    """

    model: str
    device: str
    random: bool
    dp: int
    mesh: str | None
    precision: str | None
    top1: float | None
    top5: float | None
    speed: float | None
    ttft: float | None
    cells: Mapping[str, str] = field(hash=False)
    line: int = field(compare=False)
    calibration: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, the text and the typed rows below it.

    Attributes:
        context_k: K in a long-context section.
        result_kind: measured, or the kind in the level-1 title.
        intro: text between the heading and the first table.
        rows: rows of known sections, empty for kind "other".
    """

    level: int
    title: str
    kind: SectionKind
    context_k: int | None
    result_kind: Kind
    intro: str
    rows: tuple[PerfRow, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Document:
    """Text and sections of a file. ``name`` is for messages."""

    text: str
    sections: tuple[Section, ...]
    name: str

    def find(
        self, kind: SectionKind, *, context_k: int | None = None, result_kind: Kind = "measured"
    ) -> Section | None:
        """Return a kind's section, or None.

        Raises:
            ConfigError: for several sections, because their rows might contradict each other.
        """
        wanted = (kind, context_k, result_kind)
        found = [s for s in self.sections if (s.kind, s.context_k, s.result_kind) == wanted]
        if len(found) > 1:
            lines = ", ".join(str(section.line) for section in found)
            raise ConfigError(f"{self.name}: several sections {found[0].title!r}: lines {lines}")
        return found[0] if found else None


def parse(text: str, *, name: str = "PERF.md") -> Document:
    """Parse the text of PERF.md into its sections and tables.

    Raises:
        ConfigError: with ``name`` and the line. The reason is a malformed table, a text in a
            numeric column, or a missing column Model or Device.
    """
    blocks = markdown.parse_blocks(text, name=name)
    starts = [i for i, block in enumerate(blocks) if isinstance(block, markdown.Heading)]
    sections = []
    result_kind: Kind = "measured"
    for start, end in pairwise([*starts, len(blocks)]):
        heading = blocks[start]
        assert isinstance(heading, markdown.Heading)
        if heading.level == 1:
            result_kind = KIND_TITLES.get(heading.title.lower(), "measured")
        body = blocks[start + 1 : end]
        sections.append(_section(heading, body, result_kind=result_kind, name=name))
    return Document(text, tuple(sections), name)


def load(path: str | os.PathLike[str]) -> Document:
    """Read and parse a file in the form of PERF.md.

    Raises:
        ConfigError: if the file cannot be read or is not UTF-8, or as `parse`.
    """
    return parse(read_text(Path(path)), name=str(path))


def update(path: str | os.PathLike[str], name: str, rendered: str) -> None:
    """`merge` a rendered block into a file in a single step.

    Raises:
        ConfigError: if the file cannot be read or written, or as `merge` and `parse`. The new text
            is parsed before it is written.
    """
    path = Path(path)
    existing = read_text(path) if path.exists() else ""
    text = markdown.merge(existing, name, rendered, file=str(path))
    parse(text, name=str(path))
    write_file(path, text.encode())


def match_row(
    rows: Iterable[PerfRow],
    model: str,
    device: str,
    *,
    dp: int = 1,
) -> PerfRow | None:
    """Return the row of a model on ``dp`` replicas of a device, or None.

    Names match exactly, after the alias table. Rows with a mesh, random weights or a calibration
    are another configuration.

    Raises:
        ConfigError: if several rows match.
    """
    wanted = _MODELS.get(model, model), _DEVICES.get(device, device), dp
    found = [
        row
        for row in rows
        if not (row.mesh or row.random or row.calibration)
        if (_MODELS.get(row.model, row.model), _DEVICES.get(row.device, row.device), row.dp)
        == wanted
    ]
    if len(found) > 1:
        lines = ", ".join(str(row.line) for row in found)
        raise ConfigError(
            f"model {model!r} on device {device!r} matches several rows: lines {lines}"
        )
    return found[0] if found else None


def _recognise(heading: markdown.Heading, *, name: str) -> tuple[SectionKind, int | None]:
    title = " ".join(heading.title.lower().split())
    if title in ("performance", "accuracy"):
        return ("performance" if title == "performance" else "accuracy"), None
    if title == "short-context, batch-32":
        return "batch_32", None
    if title == BOARDS_TITLE.lower():
        return "boards", None
    if found := _LONG_CONTEXT.fullmatch(title):
        return "long_context", int(found[1])
    if title.startswith("precision_cfg"):
        if not is_heading(heading.title):
            raise ConfigError(
                f"{name}:{heading.line}: heading {heading.title[:60]!r}; allowed: {HEADING_FORM}"
            )
        return "precision", None
    return "other", None


def _section(
    heading: markdown.Heading, body: tuple[markdown.Block, ...], *, result_kind: Kind, name: str
) -> Section:
    kind, context_k = _recognise(heading, name=name)
    rows: list[PerfRow] = []
    if kind != "other":
        for block in body:
            if isinstance(block, markdown.TableBlock):
                rows += _rows(block, name=name)
    intro = body[0].text.strip() if body and isinstance(body[0], markdown.Text) else ""
    return Section(
        level=heading.level,
        title=heading.title,
        kind=kind,
        context_k=context_k,
        result_kind=result_kind,
        intro=intro,
        rows=tuple(rows),
        line=heading.line,
    )


def _rows(table: markdown.TableBlock, *, name: str) -> list[PerfRow]:
    place = f"{name}:{table.line}"
    columns = table.columns
    listed = ", ".join(columns)[:200]
    listed = listed if listed.isprintable() else repr(listed)
    if len(set(columns)) != len(columns):
        raise ConfigError(f"{place}: a column stands twice in {listed}")
    if missing := [column for column in (MODEL, DEVICE) if column not in columns]:
        raise ConfigError(f"{place}: no column {missing[0]!r} among {listed}")
    if TTFT in columns and AVG_TTFT in columns:
        raise ConfigError(f"{place}: columns {TTFT!r} and {AVG_TTFT!r} exclude each other")
    return [_row(columns, line, name=name) for line in table.rows]


def _row(columns: tuple[str, ...], line: markdown.TableLine, *, name: str) -> PerfRow:
    place = f"{name}:{line.line}"
    cells = dict(zip(columns, line.cells, strict=True))
    numbers = {
        column: _number(column, cell, place=place)
        for column, cell in cells.items()
        if column in _NUMERIC
    }

    def first(*names: str) -> float | None:
        """Return the value of the first existing column."""
        return next((numbers[name] for name in names if name in columns), None)

    device, dp, mesh = _device(cells[DEVICE], place=place)
    model = cells[MODEL].removesuffix(RANDOM_WEIGHTS)
    is_random = model != cells[MODEL]
    model = model.strip()
    if not model or not device:
        raise ConfigError(f"{place}: a blank {DEVICE if model else MODEL} cell")
    return PerfRow(
        model=model,
        device=device,
        random=is_random,
        dp=dp,
        mesh=mesh,
        precision=cells.get(PRECISION),
        top1=first(TOP1, EMULATED_TOP1),
        top5=first(TOP5, EMULATED_TOP5),
        speed=first(SPEED, PREDICTED_SPEED),
        ttft=first(AVG_TTFT, TTFT, PREDICTED_TTFT),
        cells=cells,
        line=line.line,
        calibration=cells.get(CALIBRATION, ""),
    )


def _device(cell: str, *, place: str) -> tuple[str, int, str | None]:
    """Return device, replicas and mesh: ``T3K``, ``T3K  (DP=4)``, ``H200 (1x2) (DP=4)``."""
    dp, mesh, rest = None, None, cell
    while rest.endswith(")"):
        device, _, inner = rest[:-1].rpartition("(")
        found = _SUFFIX.fullmatch(inner)
        if not found or (dp if found[1] else mesh) is not None:
            raise ConfigError(f"{place}: device {cell[:60]!r}; allowed: NAME (1x2) (DP=4)")
        if found[1]:
            dp = int(found[1])
        else:
            mesh = found[2]
        rest = device.strip()
    return rest, dp or 1, mesh


def _number(column: str, cell: str, *, place: str) -> float | None:
    if not cell:
        return None
    wanted = "a percentage" if column in _PERCENT else "a number"
    value = float(cell) if _NUMBER.fullmatch(cell) else math.nan
    is_allowed = math.isfinite(value) and (value >= 0 or column == KL)
    if not is_allowed or (column in _PERCENT and value > 100):
        options = allowed([wanted, "blank"])
        raise ConfigError(f"{place}: column {column!r} is {cell[:60]!r}; {options}")
    return value
