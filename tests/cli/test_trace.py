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
    assert set(settings) == {"weights", "kv_cache", "v_cache", "activation", "fidelity"}
    assert abs(settings["weights"]["kl_gain"] - found["kl"]) < 0.02 * found["kl"] + 1e-4
    assert abs(settings["fidelity"]["kl_gain"]) < 1e-5, "the reference honors no fidelity"
    assert {"ff1_3", "ff2", "wqkv", "wo"} <= {item["operation"] for item in found["rows"]}
    assert (tmp_path / "plot.svg").is_file()
    said = run("trace", tiny_gguf, "--tokens", "32", "--fast", "--top", "3")
    assert "ff1_3" in said and "performance" in said and "worst" in said


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


@pytest.mark.parametrize(
    ("fault", "operation"),
    [
        ("li_ff1_3: lofi, li_ff2: lofi, li_qkv_prefill: lofi, li_o_prefill: lofi", "fidelity"),
        ("kv_cache: bfp4", "kv_cache"),
        ("v_cache: bfp4", "v_cache"),
    ],
)
def test_trace_on_a_board_finds_a_planted_fault_in_the_first_row(
    fault: str, operation: str, tiny_gguf: Path, run: Run
) -> None:
    """A single layer at lofi, or with keys and values in bfp4, on an emulated p150."""
    formats = "{ff1_3: bf16, ff2: bf16, wqkv: bf16, wo: bf16, lm_head: bf16, kv_cache: bf16"
    formats += ", activation: bf16}"
    names = ("li_ff1_3", "li_ff2", "li_qkv_prefill", "li_o_prefill", "sdpa_prefill", "li_lm_head")
    fidelities = ", ".join(f"{name}: hifi4" for name in names)
    heading = f"precision_cfg = {formats}, fidelity_cfg = {{{fidelities}}}"
    heading += f", layer_cfg = {{1: {{{fault}}}}}"
    argv = ("trace", tiny_gguf, "--precision", heading, "--tokens", "48", "--target", "p150")
    found = json.loads(run(*argv, "--fast", "--json"))
    first, *later = found["rows"]
    assert (first["place"], first["operation"]) == ("layer 1", operation)
    assert 0 < first["largest"] <= max(item["largest"] for item in later if item["place"] == "all")
