"""``tilewright trace`` on a tiny model: table, JSON, plot, settings of a target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.cli.main import main
from tilewright.compiler.targets.tenstorrent.emulate.arithmetic import pack
from tilewright.compiler.targets.tenstorrent.emulate.run import Emulator
from tilewright.compiler.targets.tenstorrent.program.instructions import UpdateCache
from tilewright.evaluate.tracing.settings import unusual_head

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


def test_trace_selects_cache_formats_for_a_run(tiny_gguf: Path, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "cache.yaml"
    selection = ("--cache-formats", "bfp8", "bfp4", "--max-kl", "1", "-o", path)
    printed = run("trace", tiny_gguf, "--tokens", "64", *selection)
    assert "0.v_cache" in printed and "against fp32 weights" in printed
    assert "kv_cache: bfp4" in path.read_text()
    assert run("run", tiny_gguf, "--precision", path, "--target", "reference", "--prompt", "a")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tokens", "5000"), "allowed by text and model"),
        (("--precision", "nonsense"), "unknown precision"),
        (("--target", "nowhere"), "nowhere"),
        (("--cache-formats", "bfp8"), "with --max-kl and --output FILE"),
        (("--max-kl", "1"), "with --cache-formats"),
        (("--cache-formats", "bfp8", "--max-kl", "1", "-o", "x.yaml"), "without them"),
    ],
)
def test_trace_refuses_bad_options(
    options: tuple[str, ...], said: str, tiny_gguf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(tiny_gguf), "--fast", *options]) == 2
    assert said in capfd.readouterr().err


def test_a_selection_needs_a_shipped_configuration_and_another_text(
    tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    named = tmp_path / "performance.yaml"
    named.write_text("precision: {wqkv: bfp8}\n")
    argv = ["trace", str(tiny_gguf), "--cache-formats", "bfp8", "--max-kl", "1", "-o"]
    argv.append(str(tmp_path / "out.yaml"))
    assert main([*argv, "--precision", str(named)]) == 2
    assert "a configuration of precision_cfgs/" in capfd.readouterr().err
    assert main([*argv, "--text", "held-out"]) == 2
    assert "allowed: another text" in capfd.readouterr().err


def _heading(kv_cache: str) -> str:
    names = ("li_ff1_3", "li_ff2", "li_qkv_prefill", "li_o_prefill", "sdpa_prefill", "li_lm_head")
    fidelities = ", ".join(f"{name}: hifi4" for name in names)
    formats = "ff1_3: bf16, ff2: bf16, wqkv: bf16, wo: bf16, lm_head: bf16, activation: bf16"
    formats += f", kv_cache: {kv_cache}"
    return f"precision_cfg = {{{formats}}}, fidelity_cfg = {{{fidelities}}}"


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
    heading = _heading("bf16") + f", layer_cfg = {{1: {{{fault}}}}}"
    argv = ("trace", tiny_gguf, "--precision", heading, "--tokens", "48", "--target", "p150")
    found = json.loads(run(*argv, "--fast", "--json"))
    first, *later = found["rows"]
    assert (first["place"], first["operation"]) == ("layer 1", operation)
    assert 0 < first["largest"] <= max(item["largest"] for item in later if item["place"] == "all")


def test_trace_on_a_board_finds_one_head_in_bfp4_in_the_first_row(
    tiny_gguf: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last head of layer 1 loses bits of its keys and values. All further heads are bfp8."""
    update_cache = Emulator._update_cache

    def lossy(self: Emulator, op: UpdateCache, step: Any) -> None:
        update_cache(self, op, step)
        if op.layer == 1 and op.cache.format != "bf16":
            (cache,) = self._caches[op.cache.name].parts().values()
            cache[:, :, -1] = pack(cache[:, :, -1].float(), "bfp4")

    monkeypatch.setattr(Emulator, "_update_cache", lossy)
    argv = ("trace", tiny_gguf, "--precision", _heading("bfp8"), "--tokens", "48")
    found = json.loads(run(*argv, "--target", "p150", "--fast", "--json"))
    place, operation, value, *_ = found["rows"][0].values()
    assert (place, value) == ("layer 1", "bf16") and operation.startswith("kv_cache, head ")
    assert found["rows"][0]["kl_gain"] > 0


@pytest.mark.parametrize(("activation", "are_equal"), [("mixed", True), ("bf16", False)])
def test_keys_gain_nothing_if_their_activations_have_the_cache_format(
    activation: str, are_equal: bool, tiny_gguf: Path, run: Run
) -> None:
    """Rotated keys of a prompt are bfp8 in ``mixed``. Values come from the matmul in bf16."""
    heading = _heading("bfp8").replace("activation: bf16", f"activation: {activation}")
    argv = ("trace", tiny_gguf, "--precision", heading, "--tokens", "48")
    found = json.loads(run(*argv, "--target", "p150", "--fast", "--json"))
    gains = {item["operation"]: item["kl_gain"] for item in found["rows"] if item["place"] == "all"}
    assert (gains["kv_cache"] == gains["v_cache"]) is are_equal
    assert gains["v_cache"] != 0


def test_an_unusual_head_differs_from_the_median_head() -> None:
    exact = {f"model.layers.{layer}.kv.k": torch.ones(3, 4, 2) for layer in (0, 5)}
    cached = {name: values * 1.01 for name, values in exact.items()}
    assert unusual_head(cached, exact) is None and unusual_head(exact, exact) is None
    cached["model.layers.5.kv.k"][1] *= 1.1
    assert unusual_head(cached, exact) == (5, 1)
    cached = {**exact, "model.layers.0.kv.k": torch.tensor([1.0, 1.0, 1.1]).view(3, 1, 1)}
    assert unusual_head(cached, exact) == (0, 2), "all further heads are exact"
