"""The rows of the CUDA target's bench: what was promised of them, and how they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cuda import command as bench_cuda
from bench.cuda.command import StepBench, main, programs
from bench.cuda.rows import (
    DECODE,
    DECODE_SHARE,
    PREFILL_SECONDS,
    PREFILL_SHARE,
    ROWS,
    TTFT,
    TWO_GPUS,
    find_rows,
)
from tilewright.errors import ConfigError

_DECODE = {
    ("8b", "bf16", 1): (240, 265),
    ("8b", "bf16", 8): (1800, 2050),
    ("8b", "bf16", 32): (6600, 7500),
    ("8b", "bf16", 64): (12300, 14000),
    ("8b", "bf16", 128): (18500, 23000),
    ("8b", "bf16", 256): (24500, 31000),
    ("8b", "all-bfp8", 1): (400, 480),
    ("8b", "all-bfp8", 8): (2600, 3000),
    ("8b", "all-bfp8", 32): (8000, 10000),
    ("8b", "all-bfp8", 64): (15000, 18500),
    ("8b", "all-bfp8", 128): (22500, 27000),
    ("8b", "all-bfp8", 256): (28500, 34000),
    ("8b", "performance", 1): (480, 600),
    ("8b", "performance", 8): (None, None),
    ("8b", "performance", 32): (11500, 13500),
    ("8b", "performance", 64): (18000, 22000),
    ("8b", "performance", 128): (None, None),
    ("8b", "performance", 256): (29500, 36000),
    **{("8b", "all-bfp4", batch): (None, None) for batch in (1, 8, 32, 64, 128, 256)},
    **{
        ("8b", f"all-{name}", batch): (None, None)
        for name in ("q40", "q80", "fp8")
        for batch in (1, 32, 128, 256)
    },
    **{("8b", "stored", batch): (None, None) for batch in (1, 32, 128, 256)},
    ("1b", "bf16", 1): (1150, 1450),
    ("1b", "performance", 1): (1900, 2800),
    ("70b", "performance", 1): (60, 68),
    ("70b", "performance", 64): (None, None),
    ("a3b", "bf16", 1): (300, 430),
    ("a3b", "bf16", 4): (850, 1000),
    ("a3b", "bf16", 16): (1850, 1950),
    ("a3b", "bf16", 32): (None, None),
    ("a3b", "bf16", 64): (3650, 3800),
    ("a3b", "bf16", 128): (5000, 5600),
    ("a3b", "bf16", 256): (8000, 9500),
    ("a3b", "all-bfp8", 1): (650, 750),
    ("a3b", "all-bfp8", 64): (4800, 5600),
}
"""Floor and goal of a row by model, precision and users."""


def test_the_rows_are_what_was_promised() -> None:
    """Model, precision, users, floor and goal of the table, and the bounds beside it."""
    decode = {
        (row.shape.rpartition("-")[2], row.precision, row.batch): (row.floor, row.goal)
        for row in ROWS
        if row.metric == DECODE and not row.shape.startswith("qwen3-")
    }
    assert decode == _DECODE
    first = {row.name: row.floor for row in ROWS if row.name.endswith("-ttft")}
    assert first.pop("35b-a3b-bf16-ttft") == 26
    assert first.pop("70b-performance-ttft") == 40
    codes = dict.fromkeys(("bfp4", "q40", "q80", "fp8", "nvfp4"))
    floors = {"bf16": 6, "bfp8": 6.5, "performance": 6.5, **codes}
    assert first == {f"8b-{name}-ttft": floor for name, floor in floors.items()}
    others = {
        (row.metric, row.prompt_length): row.floor
        for row in ROWS
        if row.metric != DECODE and row.precision == "bf16"
    }
    assert others == {
        (TTFT, 128): 6,
        (TTFT, 512): None,
        (TTFT, 2048): None,
        (TTFT, 1024): 26,
        (PREFILL_SHARE, 2048): 85,
        (PREFILL_SHARE, 8192): 60,
        (DECODE_SHARE, 32768): None,
        (PREFILL_SECONDS, 65536): 5,
        (DECODE_SHARE, 65536): 70,
    }
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.num_generated == 200 for row in ROWS)
    assert all(row.prompt_length + row.num_generated <= row.program[-1] for row in ROWS)


def test_rows_by_name_and_by_beginning() -> None:
    assert find_rows([]) == ROWS
    found = [row.name for row in find_rows(["8b-decode-64k", "1b-*"])]
    assert found == ["1b-bf16-b1", "1b-performance-b1", "8b-decode-64k"]
    with pytest.raises(ConfigError, match="'7b-bf16-b1'; allowed: 8b-bf16-b1, "):
        find_rows(["1b-*", "7b-bf16-b1"])
    with pytest.raises(ConfigError, match="'9b-"):
        find_rows(["9b-*"])


def test_programs_are_shared() -> None:
    found = [[row.name for row in rows] for rows in programs(ROWS)]
    users = ("b1", "ttft", "b8", "b32", "b64", "b128", "b256")
    assert found[0] == [f"8b-bf16-{each}" for each in users]
    users = ("b1", "ttft", "b8", "b32", "b64", "b128", "b256")
    assert [f"8b-performance-{each}" for each in users] in found
    assert sum("8b-prefill-2k" in rows and "8b-decode-64k" in rows for rows in found) == 1


def test_the_list_says_all(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--rows", "70b-*"]) == 0
    out, _ = capfd.readouterr()
    assert "random weights" in out and "70b-performance-b1" in out and "8b-bf16" not in out


def test_quick_rows_are_no_table_s(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[StepBench] = []
    monkeypatch.setattr(bench_cuda, "bench", lambda asked: seen.append(asked) or 0)
    assert main(["--rows", "8b-bf16-b1", "--quick"]) == 0
    assert main(["--rows", "8b-bf16-b1", "--repeats", "7"]) == 0
    quick, whole = seen
    assert (quick.repeats, quick.rows[0].num_generated, quick.results) == (2, 40, None)
    assert (whole.repeats, whole.rows[0].num_generated, whole.target) == (7, 200, "cuda")


def test_mistakes_are_refused(tmp_path: Path) -> None:
    for argv, words in [
        (["--rows", "no"], "--rows 'no'; allowed: 8b-bf16-b1"),
        (["--repeats", "0"], "allowed: integers"),
        (["--rows"], "--rows"),
        (["--results", str(tmp_path)], str(tmp_path)),
    ]:
        with pytest.raises(ConfigError) as error:
            main(argv)
        assert words in str(error.value)


def test_rows_of_two_gpus_have_floors_of_their_own() -> None:
    found = {row.name: (row.floor, row.goal) for row in find_rows((), 2)}
    assert found["8b-bf16-b1"] == (390, 430) and found["70b-bf16-b32"] == (1450, 1650)
    assert found["8b-bfp8-b1"] == (None, None) and TWO_GPUS.keys() <= found.keys()
    assert find_rows(("70b-bf16-*",), 4)[0].floor is None
    with pytest.raises(ConfigError, match="70b-bf16-b1"):
        find_rows(("70b-bf16-b1",))
