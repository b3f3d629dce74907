"""The rows of ``bench bench-cuda``: what is run, and what it must come to. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.cases.cases import TABLE_GENERATED_TOKENS, TABLE_PROMPT_LENGTH


@dataclass(frozen=True, slots=True)
class Metric:
    """What a row's figure is: ``short`` and ``text`` say it. ``is_most``: a floor is the most it
    may be. ``digits``: how many are shown.
    """

    unit: str
    short: str
    text: str
    digits: int = 1
    is_most: bool = False

    @property
    def label(self) -> str:
        """The metric as a table names it, as ``TTFT, ms``."""
        return f"{self.short}, {self.unit}"


DECODE, TTFT, PREFILL_SHARE = "decode", "ttft", "prefill share"
PREFILL_SECONDS, DECODE_SHARE, START = "prefill seconds", "decode share", "start"

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        DECODE: Metric(
            "t/s", "decode", "decoded tokens a second of all users, the first step left out"
        ),
        TTFT: Metric("ms", "TTFT", "a prompt's time to its first token", 2, is_most=True),
        PREFILL_SHARE: Metric(
            "%", "of products", "a prompt's operations a second, of those of large products"
        ),
        PREFILL_SECONDS: Metric("s", "TTFT", "a prompt's time to its first token", 2, True),
        DECODE_SHARE: Metric("%", "of reads", "decode, of the rate at which its bytes are read"),
        START: Metric("s", "start", "a process's start to the first text of a demo", is_most=True),
    }
)


@dataclass(frozen=True, slots=True)
class BenchRow:
    """A speed to measure: a shape, a precision, a load and what it must come to.

    ``floor`` and ``goal``: in the metric's unit; None: there is none. ``context``: positions that
    the program is compiled for, 0 for just those the row needs; rows of equal shape, precision and
    context share a program.
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

    @property
    def program(self) -> tuple[str, str, int]:
        """Shape, precision and positions of a program that serves the row."""
        return self.shape, self.precision, self.context or self.prompt_length + self.num_generated

    def is_met(self, value: float, bound: float) -> bool:
        """Whether a figure is as good as the floor or the goal."""
        return value <= bound if METRICS[self.metric].is_most else value >= bound


_1B, _8B, _70B = "llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b"
_35B = "qwen3.5-35b-a3b"
_2K, _64K = 2048 + TABLE_GENERATED_TOKENS, 65536 + TABLE_GENERATED_TOKENS
_8B_PRECISIONS = (
    *(("bf16", "bf16"), ("bfp8", "all-bfp8")),
    *(("performance", "performance"), ("bfp4", "all-bfp4")),
)

ROWS: tuple[BenchRow, ...] = (
    BenchRow("8b-bf16-b1", _8B, "bf16", DECODE, 240, 265),
    BenchRow("8b-bf16-ttft", _8B, "bf16", TTFT, 6),
    BenchRow("8b-bf16-b8", _8B, "bf16", DECODE, 1800, 2050, batch=8),
    BenchRow("8b-bf16-b32", _8B, "bf16", DECODE, 6600, 7500, batch=32),
    BenchRow("8b-bf16-b64", _8B, "bf16", DECODE, 12300, 14000, batch=64),
    BenchRow("8b-bf16-b128", _8B, "bf16", DECODE, 18500, 23000, batch=128),
    BenchRow("8b-bf16-b256", _8B, "bf16", DECODE, 24500, 31000, batch=256),
    BenchRow("8b-bfp8-b1", _8B, "all-bfp8", DECODE, 400, 480),
    BenchRow("8b-bfp8-ttft", _8B, "all-bfp8", TTFT, 6.5),
    BenchRow("8b-bfp8-b8", _8B, "all-bfp8", DECODE, 2600, 3000, batch=8),
    BenchRow("8b-bfp8-b32", _8B, "all-bfp8", DECODE, 8000, 10000, batch=32),
    BenchRow("8b-bfp8-b64", _8B, "all-bfp8", DECODE, 15000, 18500, batch=64),
    BenchRow("8b-bfp8-b128", _8B, "all-bfp8", DECODE, 22500, 27000, batch=128),
    BenchRow("8b-bfp8-b256", _8B, "all-bfp8", DECODE, 28500, 34000, batch=256),
    BenchRow("8b-performance-b1", _8B, "performance", DECODE, 480, 600),
    BenchRow("8b-performance-ttft", _8B, "performance", TTFT, 6.5),
    BenchRow("8b-performance-b8", _8B, "performance", DECODE, batch=8),
    BenchRow("8b-performance-b32", _8B, "performance", DECODE, 11500, 13500, batch=32),
    BenchRow("8b-performance-b64", _8B, "performance", DECODE, 18000, 22000, batch=64),
    BenchRow("8b-performance-b128", _8B, "performance", DECODE, batch=128),
    BenchRow("8b-performance-b256", _8B, "performance", DECODE, 29500, 36000, batch=256),
    BenchRow("8b-bfp4-b1", _8B, "all-bfp4", DECODE),
    BenchRow("8b-bfp4-ttft", _8B, "all-bfp4", TTFT),
    *(BenchRow(f"8b-bfp4-b{n}", _8B, "all-bfp4", DECODE, batch=n) for n in (8, 32, 64, 128, 256)),
    *(
        BenchRow(
            f"8b-{name}-ttft-{length}", _8B, precision, TTFT, prompt_length=length, context=_2K
        )
        for name, precision in _8B_PRECISIONS
        for length in (512, 2048)
    ),
    BenchRow("1b-bf16-b1", _1B, "bf16", DECODE, 1150, 1450),
    BenchRow("1b-performance-b1", _1B, "performance", DECODE, 1900, 2800),
    BenchRow("qwen3-8b-bf16-b1", "qwen3-8b", "bf16", DECODE, 235, 260),
    BenchRow("35b-a3b-bf16-b1", _35B, "bf16", DECODE, 300, 430, prompt_length=1024),
    BenchRow("35b-a3b-bf16-ttft", _35B, "bf16", TTFT, 26, prompt_length=1024),
    BenchRow("35b-a3b-bf16-b4", _35B, "bf16", DECODE, 850, 1000, batch=4, prompt_length=1024),
    BenchRow("35b-a3b-bf16-b16", _35B, "bf16", DECODE, 1850, 1950, batch=16, prompt_length=1024),
    BenchRow("35b-a3b-bf16-b32", _35B, "bf16", DECODE, batch=32, prompt_length=1024),
    BenchRow("35b-a3b-bf16-b64", _35B, "bf16", DECODE, 3650, 3800, batch=64, prompt_length=1024),
    BenchRow("35b-a3b-bf16-b128", _35B, "bf16", DECODE, 5000, 5600, batch=128, prompt_length=1024),
    BenchRow("35b-a3b-bf16-b256", _35B, "bf16", DECODE, 8000, 9500, batch=256, prompt_length=1024),
    BenchRow("35b-a3b-bfp8-b1", _35B, "all-bfp8", DECODE, 650, 750, prompt_length=1024),
    BenchRow(
        "35b-a3b-bfp8-b64", _35B, "all-bfp8", DECODE, 4800, 5600, batch=64, prompt_length=1024
    ),
    BenchRow("70b-performance-b1", _70B, "performance", DECODE, 60, 68),
    BenchRow("70b-performance-ttft", _70B, "performance", TTFT, 40),
    BenchRow("8b-prefill-2k", _8B, "bf16", PREFILL_SHARE, 85, prompt_length=2048, context=_64K),
    BenchRow("8b-prefill-8k", _8B, "bf16", PREFILL_SHARE, 60, prompt_length=8192, context=_64K),
    BenchRow("8b-decode-32k", _8B, "bf16", DECODE_SHARE, prompt_length=32768, context=_64K),
    BenchRow("8b-prefill-64k", _8B, "bf16", PREFILL_SECONDS, 5, prompt_length=65536),
    BenchRow("8b-decode-64k", _8B, "bf16", DECODE_SHARE, 70, prompt_length=65536),
    BenchRow("8b-start", _8B, "bf16", START, 15),
)
"""The rows in the order of measuring. The start is last, for then its kernels are in the cache."""


LARGE_ROWS: tuple[BenchRow, ...] = (
    BenchRow("70b-bf16-b1", _70B, "bf16", DECODE),
    BenchRow("70b-bf16-b32", _70B, "bf16", DECODE, batch=32),
)
"""What takes several GPUs."""

TWO_GPUS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
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
)
"""Floor and goal of rows on two GPUs."""


def find_rows(names: Sequence[str], num_ranks: int = 1) -> tuple[BenchRow, ...]:
    """The rows of these names in the table's order; all without names. On several GPUs there are
    more of them, and other floors and goals.

    A name that ends with ``*`` means every row that begins so.

    Raises:
        ConfigError: for a name that no row has.
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
