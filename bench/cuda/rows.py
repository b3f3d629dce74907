"""Rows of ``python -m bench bench-cuda``: workloads with a floor and a goal. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.cases.cases import TABLE_GENERATED_TOKENS, TABLE_PROMPT_LENGTH


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, with texts for tables.

    Attributes:
        short, text: name and description.
        digits: printed decimals.
        is_most: whether a floor is a maximum.
    """

    unit: str
    short: str
    text: str
    digits: int = 1
    is_most: bool = False

    @property
    def label(self) -> str:
        """The name with the unit in a table, as ``TTFT, ms``."""
        return f"{self.short}, {self.unit}"


DECODE, TTFT, PREFILL_SHARE = "decode", "ttft", "prefill share"
PREFILL_SECONDS, DECODE_SHARE = "prefill seconds", "decode share"

METRICS: Mapping[str, Metric] = {
    DECODE: Metric("t/s", "decode", "decoded tokens a second of all users, without the first step"),
    TTFT: Metric("ms", "TTFT", "time to the first token of a prompt", 2, is_most=True),
    PREFILL_SHARE: Metric("%", "of products", "share of the measured matmul rate in prefill"),
    PREFILL_SECONDS: Metric("s", "TTFT", "time to the first token of a prompt", 2, True),
    DECODE_SHARE: Metric("%", "of reads", "share of the measured read rate in decode"),
}


@dataclass(frozen=True, slots=True)
class BenchRow:
    """A speed to measure: shape, precision, load and bounds.

    Attributes:
        floor, goal: bounds in the metric's unit. None: no bound.
        scheme: scheme of the random quantized folder with the weights, see `random_files`. Empty:
            random values in the precision.
        context: the program's positions. 0: the row's positions. Rows with equal model,
            precision and context share a program.
    """

    name: str
    shape: str
    precision: str
    metric: str
    floor: float | None = None
    goal: float | None = None
    batch: int = 1
    prompt_length: int = TABLE_PROMPT_LENGTH
    num_generated: int = TABLE_GENERATED_TOKENS
    context: int = 0
    scheme: str = ""

    @property
    def model(self) -> str:
        """The shape, or the name of a quantized folder of it."""
        return "-".join(filter(None, (self.shape, self.scheme)))

    @property
    def program(self) -> tuple[str, str, int]:
        """Return the key for the row's program: model, precision and positions."""
        return self.model, self.precision, self.context or self.prompt_length + self.num_generated

    def is_met(self, value: float, bound: float) -> bool:
        """Return whether a value reaches the bound."""
        return value <= bound if METRICS[self.metric].is_most else value >= bound


_1B, _8B, _70B = "llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b"
_35B = "qwen3.5-35b-a3b"
_2K, _64K = 2048 + TABLE_GENERATED_TOKENS, 65536 + TABLE_GENERATED_TOKENS
_BLOCKS = ("bfp8", "bfp4", "q40", "q80", "fp8")
_PRECISIONS = {**{name: f"all-{name}" for name in _BLOCKS}, "nvfp4": "stored"}
"""Precisions by short name, if the names differ."""


def _rows(prefix: str, shape: str, decode: str, *, first: str = "-", **more: Any) -> list[BenchRow]:
    """Return decode rows, with a row for the first token in second place.

    Args:
        prefix: beginning for all names. It ends with the precision's short name.
        shape: shape name.
        decode: user counts with floor and goal, as ``1:240/265 8:``.
        first: floor for the first token. Empty: no floor. ``-``: no row.
        more: further row fields.
    """
    short = prefix.rpartition("-")[2]
    precision, rows = _PRECISIONS.get(short, short), []
    for text in decode.split():
        users, _, bounds = text.partition(":")
        floor, goal = map(float, bounds.split("/")) if bounds else (None, None)
        name = f"{prefix}-b{users}"
        rows.append(BenchRow(name, shape, precision, DECODE, floor, goal, batch=int(users), **more))
    if first != "-":
        floor = float(first) if first else None
        rows.insert(1, BenchRow(f"{prefix}-ttft", shape, precision, TTFT, floor, **more))
    return rows


_USERS = "1: 8: 32: 64: 128: 256:"
_8B_BF16 = "1:240/265 8:1800/2050 32:6600/7500 64:12300/14000 128:18500/23000 256:24500/31000"
_8B_BFP8 = "1:400/480 8:2600/3000 32:8000/10000 64:15000/18500 128:22500/27000 256:28500/34000"
_8B_PERFORMANCE = "1:480/600 8: 32:11500/13500 64:18000/22000 128: 256:29500/36000"
_35B_BF16 = "1:300/430 4:850/1000 16:1850/1950 32: 64:3650/3800 128:5000/5600 256:8000/9500"

ROWS: tuple[BenchRow, ...] = (
    *_rows("8b-bf16", _8B, _8B_BF16, first="6"),
    *_rows("8b-bfp8", _8B, _8B_BFP8, first="6.5"),
    *_rows("8b-performance", _8B, _8B_PERFORMANCE, first="6.5"),
    *_rows("8b-bfp4", _8B, _USERS, first=""),
    *_rows("8b-q40", _8B, "1: 32: 128: 256:", first=""),
    *_rows("8b-q80", _8B, "1: 32: 128: 256:", first=""),
    *_rows("8b-fp8", _8B, "1: 32: 128: 256:", first=""),
    *_rows("8b-nvfp4", _8B, "1: 32: 128: 256:", first="", scheme="nvfp4"),
    *(
        replace(row, name=f"{row.name}-{length}", prompt_length=length, context=_2K)
        for name in ("bf16", "bfp8", "performance", "bfp4")
        for row in _rows(f"8b-{name}", _8B, "", first="")
        for length in (512, 2048)
    ),
    *_rows("1b-bf16", _1B, "1:1150/1450"),
    *_rows("1b-performance", _1B, "1:1900/2800"),
    *_rows("qwen3-8b-bf16", "qwen3-8b", "1:235/260"),
    *_rows("qwen3-8b-performance", "qwen3-8b", "1: 32:"),
    *_rows("35b-a3b-bf16", _35B, _35B_BF16, first="26", prompt_length=1024),
    *_rows("35b-a3b-bfp8", _35B, "1:650/750 64:4800/5600", prompt_length=1024),
    *_rows("70b-performance", _70B, "1:60/68 64:", first="40"),
    BenchRow("8b-prefill-2k", _8B, "bf16", PREFILL_SHARE, 85, prompt_length=2048, context=_64K),
    BenchRow("8b-prefill-8k", _8B, "bf16", PREFILL_SHARE, 60, prompt_length=8192, context=_64K),
    BenchRow("8b-decode-32k", _8B, "bf16", DECODE_SHARE, prompt_length=32768, context=_64K),
    BenchRow("8b-prefill-64k", _8B, "bf16", PREFILL_SECONDS, 5, prompt_length=65536),
    BenchRow("8b-decode-64k", _8B, "bf16", DECODE_SHARE, 70, prompt_length=65536),
)
"""Rows in measurement order."""


LARGE_ROWS = tuple(_rows("70b-bf16", _70B, "1: 32:"))
"""Rows for several GPUs."""

TWO_GPUS: Mapping[str, tuple[float, float]] = {
    "8b-bf16-b1": (390, 430),
    "8b-bf16-b8": (2800, 3100),
    "8b-bf16-b32": (9400, 10500),
    "8b-bf16-b64": (17000, 19000),
    "8b-bf16-ttft": (4.5, 3.8),
    "8b-performance-b1": (640, 720),
    "35b-a3b-bf16-b1": (530, 570),
    "35b-a3b-bf16-b4": (1400, 1520),
    "35b-a3b-bf16-b16": (2800, 3100),
    "35b-a3b-bf16-b64": (5900, 6400),
    "35b-a3b-bf16-ttft": (20, 17),
    "70b-bf16-b1": (54, 58),
    "70b-bf16-b32": (1450, 1650),
    "70b-performance-b1": (100, 110),
}
"""Floor and goal of rows on two GPUs."""


def find_rows(names: Sequence[str], num_ranks: int = 1) -> tuple[BenchRow, ...]:
    """Return the rows with these names in table order, or all rows.

    A name that ends with ``*`` selects all rows with this beginning. Several GPUs have additional
    rows, and other floors and goals.

    Raises:
        ConfigError: for an unknown name.
    """
    rows = ROWS
    if num_ranks > 1:
        bounds = TWO_GPUS if num_ranks == 2 else {}
        rows = tuple(
            replace(row, floor=floor, goal=goal)
            for row in (*ROWS, *LARGE_ROWS)
            for floor, goal in [bounds.get(row.name, (None, None))]
        )
    for name in names:
        if not any(_is_named(row, name) for row in rows):
            raise ConfigError(f"--rows {name!r}; {allowed(row.name for row in rows)}")
    return tuple(row for row in rows if not names or any(_is_named(row, name) for name in names))


def _is_named(row: BenchRow, name: str) -> bool:
    return row.name.startswith(name[:-1]) if name.endswith("*") else row.name == name
