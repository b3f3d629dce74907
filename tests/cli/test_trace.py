"""``tilewright trace`` on a tiny model: table, JSON, plot, settings of a target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tilewright.cli.main import main

Run = Callable[..., str]


def test_trace_prints_operations_and_settings_of_a_target(
    tiny_gguf: Path, tmp_path: Path, run: Run
) -> None:
    argv = (
        "trace",
        tiny_gguf,
        "--precision",
        "all-bfp4",
        "--tokens",
        "64",
        "--target",
        "reference",
    )
    found = json.loads(run(*argv, "--json", "--plot", tmp_path / "plot"))
    settings = {row["operation"]: row for row in found["rows"] if row["place"] == "all"}
    assert set(settings) == {"weights", "kv_cache", "activation", "fidelity"}
    assert abs(settings["weights"]["kl_gain"] - found["kl"]) < 0.02 * found["kl"] + 1e-4
    assert abs(settings["fidelity"]["kl_gain"]) < 1e-5, "the reference honors no fidelity"
    assert {"ff1_3", "ff2", "wqkv", "wo"} <= {row["operation"] for row in found["rows"]}
    assert (tmp_path / "plot.svg").is_file()
    said = run("trace", tiny_gguf, "--tokens", "32", "--fast", "--top", "3")
    assert "ff1_3" in said and "performance" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tokens", "5000"), "allowed by text and model"),
        (("--precision", "nonsense"), "unknown precision"),
        (("--target", "nowhere"), "nowhere"),
    ],
)
def test_trace_refuses_bad_options(
    options: tuple[str, ...], said: str, tiny_gguf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(tiny_gguf), "--fast", *options]) == 2
    assert said in capfd.readouterr().err
