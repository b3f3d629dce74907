"""Files of the vendor: weight_dtype_overrides of tt-xla, model_targets.yaml of tt-metal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import tiny_model
from tilewright.compiler.driver import resolve_precision
from tilewright.compiler.precision import load_precision
from tilewright.compiler.precision.weight_overrides import weight_overrides
from tilewright.compiler.tracer import grouped_modules
from tilewright.errors import ConfigError
from tilewright.evaluate.model_targets import read_targets

Run = Callable[..., str]
LLAMA = {
    "default": "bfp_bf8",
    "model.layers.*.mlp.gate_proj.weight": "bfp_bf4",
    "model.layers.*.mlp.up_proj.weight": "bfp_bf4",
    "model.layers.1.self_attn.o_proj.weight": "bf16",
}
TARGETS = """\
version: 1
description: test
targets:
  tiny:
    aliases: []
    skus:
      bh_p150:
        entries:
          - batch_size: 1
            seq_len: 128
            status: active
            perf:
              decode_t/s/u: 20.3
              tolerance: 0.1
          - batch_size: 32
            status: TODO
"""


def written(folder: Path, value: object) -> str:
    path = folder / "overrides.json"
    path.write_text(json.dumps(value))
    return str(path)


def test_overrides_are_read_and_written(tmp_path: Path) -> None:
    model = tiny_model()
    resolved = resolve_precision(model, load_precision(written(tmp_path, LLAMA)))
    for layer, wo in ((0, "bfp8"), (1, "bf16")):
        path = f"model.layers.{layer}"
        found = {
            group: resolved.format(group, layer=layer, fqn=f"{path}.{name}")
            for group, name in (
                ("ff1_3", "mlp.up_proj"),
                ("ff2", "mlp.down_proj"),
                ("wo", "self_attn.o_proj"),
            )
        }
        assert found == {"ff1_3": "bfp4", "ff2": "bfp8", "wo": wo}
    entries, dropped = weight_overrides(resolved, grouped_modules(model.module))
    again = resolve_precision(model, load_precision(written(tmp_path, entries)))
    assert "fidelity" in dropped and entries["default"] == "bfp_bf8"
    names = [module for module in grouped_modules(model.module) if module.group in ("wo", "ff1_3")]
    for module in names:
        at = {"layer": module.layer, "fqn": module.fqn}
        assert again.format(module.group, **at) == resolved.format(module.group, **at)


def test_a_string_is_the_default_and_later_keys_win(tmp_path: Path) -> None:
    model = tiny_model()
    everywhere = load_precision(written(tmp_path, "bfp_bf4"))
    assert resolve_precision(model, everywhere).format("ff2", layer=0) == "bfp4"
    later = {"model.layers.*.mlp.down_proj.weight": "bf16", "default": "bfp_bf4"}
    at = {"layer": 0, "fqn": "model.layers.0.mlp.down_proj"}
    resolved = resolve_precision(model, load_precision(written(tmp_path, later)))
    assert resolved.format("ff2", **at) == "bfp4"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"default": "bfp_bf3"}, "default: 'bfp_bf3'; allowed: bfp_bf4, bfp_bf8"),
        ({"model.layers.*.nothing.weight": "bf16"}, "matches no weight; allowed: model.layers"),
        ({"model.layers.9.mlp.up_proj.weight": "bf16"}, "layers.9"),
    ],
)
def test_bad_overrides_are_refused(tmp_path: Path, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=None) as caught:
        resolve_precision(tiny_model(), load_precision(written(tmp_path, value)))
    assert said in str(caught.value)


def test_targets_are_compared_and_written(tiny_gguf: Path, tmp_path: Path, run: Run) -> None:
    given, made = tmp_path / "targets.yaml", tmp_path / "made.yaml"
    given.write_text(TARGETS)
    (target,) = read_targets(given)
    assert (target.board, target.users, target.tsu, target.tolerance) == ("p150", 1, 20.3, 0.1)
    argv = ("plan", tiny_gguf, "--boards", "p150", "--context", "64", "--prompt", "32")
    overrides = tmp_path / "overrides.json"
    files = ("--targets", given, "--write-targets", made, "--write-overrides", overrides)
    out = run(*argv, *files, "--precision", "performance")
    assert "CI targets, not measurements" in out and "20.3" in out
    assert read_targets(made) == [], "predictions have the status TODO"
    assert "bh_p150" in made.read_text() and "predicted" in made.read_text()
    assert json.loads(overrides.read_text())["default"] == "bfp_bf8"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("version: 1", "version: 2", "version 2; allowed: 1"),
        ("bh_p150", "bh_p151", "unknown board; allowed: wh_n150"),
        ("20.3", "fast", "'fast' is no number"),
    ],
)
def test_bad_targets_are_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "targets.yaml"
    path.write_text(TARGETS.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        read_targets(path)
    assert said in str(caught.value)
