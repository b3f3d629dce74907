"""``tilewright plan`` on a tiny model: table, JSON, emulated accuracy, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import change_shape
from tilewright.cli.main import main

Run = Callable[..., str]


def test_plan_prints_boards_as_json_and_as_a_table(
    tiny_gguf: Path, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ("plan", tiny_gguf, "--boards", "n150,p150,n150", "--context", "64", "--prompt", "32")
    precisions = ("--precision", "performance,all-bfp8")
    rows = json.loads(run(*argv, *precisions, "--json", "--accuracy", "8", "--layers", "1"))
    assert sorted((row["board"], row["precision"]) for row in rows) == [
        (board, name) for board in ("n150", "p150") for name in ("all-bfp8", "performance")
    ]
    for row in rows:
        assert row["tsu"] > 0 and row["ttft_ms"] > 0 and row["chip_bytes"] > 0
        assert row["accuracy"]["positions"] == 8 and row["accuracy"]["layers"] == 1
        assert row["accuracy"]["all_layers"] > 1
        low, high = row["accuracy"]["interval"]
        assert 0 <= low <= row["accuracy"]["top1"] <= high <= 1 and high - low > 0.2
    assert rows == sorted(rows, key=lambda row: -row["tsu"])
    assert main([str(item) for item in (*argv, "--precision", "performance")]) == 0
    table, notes = capfd.readouterr()
    assert "| board" in table and "predicted" in table and "p150" in table
    assert "±" not in table and "without an error bar: an extrapolation" in notes


@pytest.mark.parametrize(("max_positions", "context"), [(1024, 1024), (4096, 2048)])
def test_the_default_context_is_within_the_model(
    max_positions: int,
    context: int,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    change_shape(monkeypatch, "tiny", max_position_embeddings=max_positions)
    assert main(["plan", "shape:tiny", "--boards", "p150", "--precision", "performance"]) == 0
    assert f"users 1, context {context}, prompt 128" in capfd.readouterr().err


def test_plan_of_large_shapes_names_boards_with_and_without_room(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few layers of many experts: about 22 GB, and little to trace."""
    few = {"num_hidden_layers": 4, "num_experts": 1024, "moe_intermediate_size": 1536}
    change_shape(monkeypatch, "qwen3-30b-a3b", **few)
    boards = "n150,p150,qb2"
    argv = ("--boards", boards, "--precision", "performance", "--json")
    rows = json.loads(run("plan", "shape:qwen3-30b-a3b", *argv))
    by_board = {row["board"]: row for row in rows}
    assert "exceeded by" in by_board["n150"]["refused"]
    assert by_board["qb2"]["tsu"] > by_board["p150"]["tsu"] > 0
    assert by_board["qb2"]["tsu_error"] is None, "no published row of experts is fitted"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--boards", "n151"), "--boards: unknown board 'n151'; allowed: n150"),
        (("--prompt", "999"), "--prompt 999; allowed: up to --context 64"),
        (("--context", "9999999"), "--context 9999999; allowed by"),
        (("--boards", "t3k"), "allowed: meshes of at most"),
        (("--precision", "nonsense"), "unknown precision"),
    ],
)
def test_plan_refuses_bad_options(
    options: tuple[str, ...], said: str, tiny_gguf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = [] if "--prompt" in options else ["--prompt", "32"]
    sizes += [] if "--context" in options else ["--context", "64"]
    argv = ["plan", str(tiny_gguf), *sizes, *options]
    assert main(argv) == 2
    error = capfd.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


def test_plan_without_room_says_by_how_many_bytes(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change_shape(monkeypatch, "llama-3.2-1b", num_hidden_layers=8)
    argv = ["plan", "shape:llama-3.2-1b", "--boards", "n150,n300", "--precision", "performance"]
    assert main([*argv, "--users", "32", "--context", "131072"]) == 2
    error = capfd.readouterr().err
    assert "n300" in error and "exceeded by" in error and "bytes; allowed" in error
    assert len(error.splitlines()) == 1


def test_plan_of_random_weights_has_no_accuracy(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "shape:tiny", "--accuracy", "8"]) == 2
    assert "random weights; allowed: a checkpoint" in capfd.readouterr().err
