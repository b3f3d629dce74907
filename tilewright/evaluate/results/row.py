"""Flat rows with values for Markdown, CSV, JSON, PERF.md and the terminal.

`ResultRow.of` flattens a record. `COLUMNS` has the texts for printed columns. `table_of` makes a
table of rows.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tilewright.compiler.devices import BOARDS
from tilewright.evaluate.report import display
from tilewright.evaluate.report.table import CsvValue, Table
from tilewright.evaluate.results import stats
from tilewright.evaluate.results.record import RANDOM_WEIGHTS, Accuracy, Result


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """Values for a configuration on a device. None: unknown.

    A field name contains the unit. It is also the CSV column and the JSON key. Rates are in tokens
    per second and user, except ``all_users_...``.

    Attributes:
        names: the configurations, separated by commas.
        dates, commits, machines, commands: the values' origin, "-" if unknown.
        is_of_other_run: whether most rows of the table have another origin.
    """

    model: str = ""
    device: str = ""
    names: str = ""
    calibration: str = ""
    dates: str = ""
    commits: str = ""
    machines: str = ""
    commands: str = ""
    is_of_other_run: bool = False
    accuracy_text: str | None = None
    reference_id: str | None = None
    positions: int | None = None
    top1_positions: int | None = None
    top1_percent: float | None = None
    top1_low_percent: float | None = None
    top1_high_percent: float | None = None
    top5_positions: int | None = None
    top5_percent: float | None = None
    top5_low_percent: float | None = None
    top5_high_percent: float | None = None
    kl_nats: float | None = None
    kl_standard_error_nats: float | None = None
    base: str | None = None
    only_base_positions: int | None = None
    only_this_positions: int | None = None
    mcnemar_p: float | None = None
    speed_case: str | None = None
    batch: int | None = None
    prompt_length: int | None = None
    repeats: int | None = None
    decode_tokens_per_s: float | None = None
    decode_spread_fraction: float | None = None
    decode_low_tokens_per_s: float | None = None
    decode_high_tokens_per_s: float | None = None
    decode_error_fraction: float | None = None
    all_users_tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    ttft_ms: float | None = None
    ttft_spread_fraction: float | None = None
    ttft_error_fraction: float | None = None
    ttft_first_ms: float | None = None
    ttft_median_ms: float | None = None
    ttft_last_ms: float | None = None
    peak_memory_bytes: int | None = None
    weight_bytes: int | None = None
    cache_bytes: int | None = None

    @classmethod
    def of(
        cls,
        speed: Result | None = None,
        accuracy: Accuracy | None = None,
        *,
        of: Result | None = None,
        names: Sequence[str] = (),
        taken: Sequence[Result] = (),
    ) -> ResultRow:
        """Return the row for a timed result and an accuracy, both optional.

        Args:
            speed: timed result.
            accuracy: accuracy.
            of: the result with model and device. None: ``speed``.
            names: the row's configurations. Empty: the result's name.
            taken: records with the values, for their origin.
        """
        owner = of or speed
        return cls(
            model="" if owner is None else model_text(owner),
            device="" if owner is None else device_text(owner),
            names=", ".join(names) or ("" if owner is None else owner.precision_name),
            calibration="" if owner is None else owner.calibration,
            **origin(taken),
            **accuracy_figures(accuracy),
            **speed_figures(speed),
        )

    def values(self, fields: Iterable[str] = ()) -> dict[str, CsvValue]:
        """Return the unrounded values by field: the named fields, or all."""
        found = dataclasses.asdict(self)
        return {name: found[name] for name in fields} if fields else found


def model_text(result: Result) -> str:
    """Return the model's name with a mark for random weights."""
    return f"{result.model} {RANDOM_WEIGHTS}" if result.weights == "random" else result.model


def device_text(result: Result) -> str:
    """Return the device with its mesh and its replicas.

    A single-device mesh is omitted, and so is a board's mesh, because the board's name
    implies it.
    """
    mesh = "" if result.target in BOARDS or result.mesh == "1x1" else f" ({result.mesh})"
    return f"{result.device}{mesh}" + (f" (DP={result.dp})" if result.dp > 1 else "")


def origin(results: Sequence[Result]) -> dict[str, Any]:
    """Return the values' origin. Equal texts in several records occur once."""
    texts = {
        "dates": lambda r: r.when.date().isoformat(),
        "commits": lambda r: display.short_commit(r.commit, none="-"),
        "machines": machine_text,
        "commands": lambda r: display.cell_text(display.plain_line(r.command)) or "-",
    }
    return {
        name: "; ".join(dict.fromkeys(text(result) for result in results))
        for name, text in texts.items()
    }


_ONE_THREAD = re.compile(r"\b1 threads$")


def machine_text(result: Result) -> str:
    """Return the machine type with its threads, or with its used devices."""
    rows, columns = map(int, result.mesh.split("x"))
    count = result.dp * rows * columns
    text = _ONE_THREAD.sub("1 thread", result.device_detail)
    if count > 1 or not text.endswith((" threads", " thread")):
        text += f", {count} device{'s' if count > 1 else ''}"
    return display.cell_text(display.plain_line(text)).removeprefix(", ") or "-"


def accuracy_figures(accuracy: Accuracy | None) -> dict[str, Any]:
    """Return an accuracy's values by field, with shares in percent. None: all unknown."""
    if accuracy is None:
        return dict.fromkeys(_ACCURACY_FIELDS)
    n, pair = accuracy.num_positions, accuracy.paired
    values: tuple[CsvValue, ...] = (
        *(accuracy.text, accuracy.reference_id, n),
        *(accuracy.num_top1, 100 * accuracy.num_top1 / n),
        *(100 * bound for bound in accuracy.top1_interval),
        *(accuracy.num_top5, 100 * accuracy.num_top5 / n),
        *(100 * bound for bound in accuracy.top5_interval),
        *(accuracy.kl_mean, accuracy.kl_error),
        *((pair.base, pair.b, pair.c, pair.p) if pair else (None,) * 4),
    )
    return dict(zip(_ACCURACY_FIELDS, values, strict=True))


_FIELDS = [field.name for field in dataclasses.fields(ResultRow)]
_ACCURACY_FIELDS = _FIELDS[_FIELDS.index("accuracy_text") : _FIELDS.index("speed_case")]
_SPEED_FIELDS = _FIELDS[_FIELDS.index("speed_case") :]
_OF_RESULT: Mapping[str, str] = MappingProxyType(
    {
        "speed_case": "case",
        "decode_tokens_per_s": "decode_tsu",
        "decode_spread_fraction": "spread",
        "decode_error_fraction": "decode_error",
        "all_users_tokens_per_s": "tps",
        "prefill_tokens_per_s": "prefill_tps",
        "ttft_spread_fraction": "ttft_spread",
        "ttft_error_fraction": "ttft_error",
        "weight_bytes": "resident_bytes",
    }
)
"""Field of a record for each field of a row with another name."""
_SPEED_INTERVAL = ("decode_low_tokens_per_s", "decode_high_tokens_per_s")


def speed_figures(result: Result | None) -> dict[str, Any]:
    """Return a timed result's values by field. None: all unknown."""
    if result is None:
        return dict.fromkeys(_SPEED_FIELDS)
    found = {
        name: getattr(result, _OF_RESULT.get(name, name))
        for name in _SPEED_FIELDS
        if name not in _SPEED_INTERVAL
    }
    low_high = interval(result, "decode_tsu") or (None, None)
    ends = zip(_SPEED_INTERVAL, low_high, strict=True)
    return {**found, **dict(ends), "repeats": len(result.repeats)}


def interval(result: Result, field: str) -> tuple[float, float] | None:
    """Return the 95 % interval of a repeated field's mean, or None for few repeats."""
    values = [value for each in result.repeats if (value := getattr(each, field)) is not None]
    found = stats.mean_interval(values)[1] if values else None
    return None if found is None else (max(0.0, found[0]), found[1])


def _interval(which: str) -> Callable[[ResultRow], str]:
    low, high = f"{which}_low_percent", f"{which}_high_percent"
    return lambda row: display.span(getattr(row, low), getattr(row, high))


def _decimal(field: str, digits: int = 1) -> Callable[[ResultRow], str]:
    return lambda row: display.decimal(getattr(row, field), digits)


def _percent(field: str, digits: int = 1) -> Callable[[ResultRow], str]:
    return lambda row: display.percent(getattr(row, field), digits)


def _paired(row: ResultRow) -> str:
    pair = row.only_this_positions, row.only_base_positions, row.mcnemar_p
    return display.discordant(*pair, base=row.base or "")


MODEL, DEVICE, PRECISION = "Model", "Device", "Precision"
CALIBRATION = "Calibration"
"""Column of calibrated weights, in tables with calibrated rows."""
TOP1, TOP5, SPEED = "Top-1 (%)", "Top-5 (%)", "Speed (t/s/u)"
TTFT, AVG_TTFT = "TTFT (ms)", "avg TTFT (ms)"
TOTAL = "Total (t/s)"
FIRST_TTFT, MEDIAN_TTFT, LAST_TTFT = "first TTFT (ms)", "median TTFT (ms)", "last TTFT (ms)"
TOP1_INTERVAL, TOP5_INTERVAL = "Top-1 95 % CI", "Top-5 95 % CI"
POSITIONS, KL, PAIRED, SPREAD, PEAK = "Positions", "KL", "vs base", "Spread (%)", "Peak (MB)"
SPEED_INTERVAL, TTFT_SPREAD = "Speed 95 % CI", "TTFT spread (%)"
DATE, COMMIT, MACHINE, COMMAND = "Date", "Commit", "Machine", "Command"
OTHER_RUN, CHANGED = "\u2020", "\u2021"
WEIGHTS, SPEED_ERROR, TTFT_ERROR = "Weights (MB)", "Speed error (%)", "TTFT error (%)"
LENGTHS = "Batch x prompt"


def marks(commits: str, *, is_of_other_run: bool) -> list[str]:
    """Return a row's marks: `OTHER_RUN`, and `CHANGED` for a commit with local changes."""
    signs = ((OTHER_RUN, is_of_other_run), (CHANGED, "-dirty" in commits))
    return [sign for sign, is_so in signs if is_so]


COLUMNS: Mapping[str, Callable[[ResultRow], str]] = MappingProxyType(
    {
        MODEL: lambda row: row.model,
        DEVICE: lambda row: row.device,
        PRECISION: lambda row: row.names,
        CALIBRATION: lambda row: row.calibration,
        LENGTHS: lambda row: "" if row.batch is None else f"{row.batch} x {row.prompt_length}",
        TOP1: _decimal("top1_percent"),
        TOP5: _decimal("top5_percent"),
        TOP1_INTERVAL: _interval("top1"),
        TOP5_INTERVAL: _interval("top5"),
        POSITIONS: _decimal("positions", 0),
        KL: lambda row: display.significant(row.kl_nats),
        PAIRED: _paired,
        SPEED: _decimal("decode_tokens_per_s"),
        SPEED_ERROR: _percent("decode_error_fraction", 0),
        SPREAD: _percent("decode_spread_fraction"),
        SPEED_INTERVAL: lambda row: display.span(
            row.decode_low_tokens_per_s, row.decode_high_tokens_per_s
        ),
        TTFT_SPREAD: _percent("ttft_spread_fraction"),
        TOTAL: _decimal("all_users_tokens_per_s"),
        TTFT: _decimal("ttft_ms"),
        AVG_TTFT: _decimal("ttft_ms"),
        TTFT_ERROR: _percent("ttft_error_fraction", 0),
        FIRST_TTFT: _decimal("ttft_first_ms"),
        MEDIAN_TTFT: _decimal("ttft_median_ms"),
        LAST_TTFT: _decimal("ttft_last_ms"),
        PEAK: lambda row: display.megabytes(row.peak_memory_bytes),
        WEIGHTS: lambda row: display.megabytes(row.weight_bytes, 1),
        DATE: lambda row: " ".join(
            filter(None, (row.dates, *marks(row.commits, is_of_other_run=row.is_of_other_run)))
        ),
        COMMIT: lambda row: row.commits,
        MACHINE: lambda row: row.machines,
        COMMAND: lambda row: row.commands,
    }
)
"""Functions from a row to the text of a printed column, by column title."""


def cells(row: ResultRow, titles: Iterable[str]) -> tuple[str, ...]:
    """Return a row's texts in these columns."""
    return tuple(COLUMNS[title](row) for title in titles)


def table_of(titles: Sequence[str], rows: Iterable[ResultRow], *notes: str) -> Table:
    """Return a table of rows with these columns, and `CALIBRATION` if needed."""
    lines, titles = list(rows), list(titles)
    if any(line.calibration for line in lines):
        titles.insert(1 + titles.index(PRECISION if PRECISION in titles else DEVICE), CALIBRATION)
    return Table.of(titles, (cells(line, titles) for line in lines), *notes)
