"""Kernel benchmark without a GPU: cases, bad arguments; with a GPU: every kind of case runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import kernels
from bench.__main__ import main
from bench.kernels import CASES, Variant, find_cases
from tests.cli.conftest import Refused
from tilewright.errors import ConfigError
from tilewright.evaluate.report.comparisons import read_rows


def test_cases_are_found_by_their_beginnings() -> None:
    assert find_cases([""]) == CASES and len(CASES) > 20
    assert list(find_cases(["delta", "sampling-128"])) == ["delta-step", "sampling-128256"]
    with pytest.raises(ConfigError, match="'linear'; allowed: matmul, layer, attention, experts, "):
        find_cases(["linear"])


def test_the_list_needs_no_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--list", "--cases", "experts"]) == 0
    assert capfd.readouterr().out.split() == ["experts-bf16", "experts-bfp8", "experts-bfp4"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [(("--rows", "0"), "--rows: '0'; allowed: integers"), (("--cases", "no"), "--cases 'no'")],
)
def test_mistakes_are_one_line(refused: Refused, argv: tuple[str, ...], said: str) -> None:
    assert said in refused(*argv, verb="kernels")


def test_figures_are_printed_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def build(rows: int) -> Iterator[Variant]:
        yield Variant("one", lambda at: None, 2, 2e6)
        if rows > 1:
            yield Variant("many", lambda at: None, 2)

    monkeypatch.setattr(kernels, "CASES", {"made-up": build})
    monkeypatch.setattr(kernels, "check_gpu", lambda: None)
    monkeypatch.setattr(kernels, "microseconds", lambda variant, duration_ms: 4.0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    path = tmp_path / "rows.jsonl"
    assert main(["kernels", "--rows", "1", "8", "--results", str(path)]) == 0
    lines = [line.split("|")[1:-1] for line in capfd.readouterr().out.splitlines() if "|" in line]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert cells[0] == ["made-up", "1 rows", "8 rows"]
    assert cells[2:] == [["one", "4.00 (0.50)", "4.00 (0.50)"], ["many", "", "4.00"]]
    kept = [(row["kernel"], row["rows"], row["us"]) for row in read_rows(path, "kernels")]
    assert kept == [("one", 1, 4.0), ("one", 8, 4.0), ("many", 8, 4.0)]


@pytest.mark.gpu(memory_gb=6)
@pytest.mark.parametrize(
    "name",
    [
        "matmul-4096x14336-bfp8",
        "attention-8b-bfp8-230",
        "delta-step",
        "experts-bf16",
        "experts-bfp8",
        "expert-layer-bf16",
        "sampling-128256",
        "matmul-28672x4096-bf16",
    ],
)
def test_a_case_is_timed(name: str) -> None:
    for rows in (1, 64):
        for variant in CASES[name](rows):
            assert 0 < kernels.microseconds(variant, 5) < 1e5
