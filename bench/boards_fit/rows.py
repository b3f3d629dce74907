"""The published rows of boards as samples of the performance model, by what they are good for."""

from __future__ import annotations

from dataclasses import dataclass

from bench.boards_fit.fitting import Sample, sample_of
from bench.boards_fit.programs import (
    PUBLISHED,
    Programs,
    published_precision,
)
from tilewright.compiler.precision import Phase, load_precision
from tilewright.evaluate.report.perf_md import Document, PerfRow, Section

PROMPT, GENERATED = 128, 200
"""Tokens of a published short row; a decode step sees half of the generated ones on average."""

_DEVICES = {"N150": "n150", "150": "n150", "N300": "n300", "T3K": "t3k", "TG": "tg"}
_BATCH = {"batch_32": 32}
_NAMES = {"150": "N150"}
VISION = "Llama3.2-90B"
"""Its speeds have one digit, and its prompts took 30 times those of the same sizes without
cross-attention: measured with an image, it seems."""


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A published row: samples of its step and its prompt where it has such figures."""

    kind: str
    title: str
    row: PerfRow
    decode: Sample | None
    prefill: Sample | None

    @property
    def device(self) -> str:
        """The device's name as it is printed, replicas included."""
        return device_name(self.row)

    @property
    def is_judged(self) -> bool:
        """One of the rows that the model is judged by: a whole board of up to eight chips."""
        is_board = self.is_whole and self.row.device != "TG"
        return is_board and self.row.model != VISION

    @property
    def is_galaxy(self) -> bool:
        """One of 32 chips, which take part in the fit of decode."""
        return self.is_whole and self.row.device == "TG"

    @property
    def is_whole(self) -> bool:
        """One user on a whole device, a short prompt, a configuration by name."""
        return self.kind in ("performance", "accuracy") and self.row.dp == 1


def device_name(row: PerfRow) -> str:
    """The board, and how many replicas share it."""
    name = _NAMES.get(row.device, row.device)
    return name if row.dp == 1 else f"{name} (DP={row.dp})"


def read_rows(document: Document, programs: Programs, reading: str) -> list[PublishedRow]:
    """Every row with a figure, of models whose sizes are known."""
    found = []
    for section in document.sections:
        for row in section.rows:
            if row.model in PUBLISHED and (row.speed is not None or row.ttft is not None):
                found.append(_row(section, row, programs, reading))
    return found


def _row(section: Section, row: PerfRow, programs: Programs, reading: str) -> PublishedRow:
    length = PROMPT if section.context_k is None else 1024 * section.context_k
    precision = (
        load_precision(section.title)
        if section.kind == "precision"
        else published_precision(section.kind, row.model, reading)
    )

    def sample(phase: Phase, seconds: float | None) -> Sample | None:
        if seconds is None:
            return None
        is_decode = phase == "decode"
        program = programs.get(
            row.model,
            precision,
            device=_DEVICES[row.device],
            phase=phase,
            num_replicas=row.dp,
            batch=_BATCH.get(section.kind, 1) if is_decode else 1,
            length=1 if is_decode else length,
            context=length + GENERATED // 2 if is_decode else length,
        )
        return sample_of(
            program,
            model=row.model,
            device=device_name(row),
            source=section.kind,
            seconds=seconds,
        )

    step = None if row.speed is None else 1 / row.speed
    prompt = None if row.ttft is None else row.ttft / 1e3
    return PublishedRow(
        section.kind, section.title, row, sample("decode", step), sample("prefill", prompt)
    )
