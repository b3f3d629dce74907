"""Files of the vendor: weight_dtype_overrides of tt-xla, model_targets.yaml of tt-metal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import tiny_model
from tilewright.cli.main import main
from tilewright.compiler.driver import resolve_precision
from tilewright.compiler.precision import load_precision
from tilewright.compiler.precision.weight_overrides import weight_overrides
from tilewright.compiler.tracer import grouped_modules
from tilewright.errors import ConfigError
from tilewright.evaluate.board_comparison import BoardAccuracy, BoardCandidate
from tilewright.evaluate.model_targets import read_targets, targets_text
from tilewright.models import load_model

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
  other:
    aliases: []
    skus:
      p300x2:
        entries:
          - status: TODO
            perf: {}
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
              prefill_time_to_first_token: 75
              prefill_time_to_first_token_tolerance: 0.2
              tolerance: 0.1
            accuracy:
              top1: 91
              top5: 98.5
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
    name = load_model(tiny_gguf).name
    given.write_text(TARGETS.replace("aliases: []", f"aliases: [{name}-Instruct]"))
    (target,) = read_targets(given, name)
    assert (target.top1, target.top5) == (91.0, 98.5)
    assert (target.board, target.users, target.tsu, target.tolerance) == ("p150", 1, 20.3, 0.1)
    assert (target.length, target.ttft_ms, target.ttft_tolerance) == (128, 75.0, 0.2)
    argv = ("plan", tiny_gguf, "--boards", "p150", "--context", "64", "--prompt", "32")
    overrides = tmp_path / "overrides.json"
    files = ("--targets", given, "--write-targets", made, "--write-overrides", overrides)
    out = run(*argv, *files, "--precision", "performance")
    assert "CI targets, not measurements" in out and "20.3" in out
    assert "other" not in out and "75.0" in out and "91.0" in out
    assert read_targets(made, name) == [], "predictions have the status TODO"
    assert "bh_p150" in made.read_text() and "predicted" in made.read_text()
    assert "top1" not in made.read_text(), "nothing was emulated"
    assert json.loads(overrides.read_text())["default"] == "bfp_bf8"


@pytest.mark.parametrize(("layers", "exported"), [(2, True), (1, False)])
def test_written_targets_have_tolerances_and_the_whole_model_s_top1(
    layers: int, exported: bool, tmp_path: Path
) -> None:
    accuracy = BoardAccuracy(0.785, 0.979, (0.7, 0.8), 512, layers, 2)
    row = BoardCandidate("qb2", 4, "performance", 1, 40.0, 0.159, 90.0, 0.122, accuracy)
    text = targets_text("tiny", [row], users=1, prompt=128)
    assert ("accuracy:\n              top1: 78.5\n              top5: 97.9\n" in text) is exported
    path = tmp_path / "targets.yaml"
    path.write_text(text.replace("TODO", "active"))
    (target,) = read_targets(path, "tiny")
    assert (target.board, target.tsu, target.ttft_ms) == ("qb2", 40.0, 90.0)
    assert (target.users, target.length) == (1, 128)
    assert (target.tolerance, target.ttft_tolerance) == (0.159, 0.122)
    assert (target.top1, target.top5) == ((78.5, 97.9) if exported else (None, None))


def test_an_accuracy_target_is_compared_with_a_wholly_emulated_model(
    tiny_gguf: Path, tmp_path: Path, run: Run
) -> None:
    """The entry has no speed."""
    path, name = tmp_path / "targets.yaml", load_model(tiny_gguf).name
    speed = TARGETS[TARGETS.index("            perf:\n              dec") :]
    speed = speed[: speed.index("            accuracy:")]
    path.write_text(TARGETS.replace(speed, "").replace("aliases: []", f"aliases: [{name}]"))
    (target,) = read_targets(path, name)
    assert (target.tsu, target.ttft_ms, target.top1) == (None, None, 91.0)
    argv = ("plan", tiny_gguf, "--boards", "p150", "--prompt", "32", "--targets", path)
    argv = (*argv, "--precision", "performance", "--accuracy", "8", "--layers")
    for layers, is_compared in ((0, True), (1, False)):
        speeds, _, table = run(*argv, layers).partition("CI targets of accuracy")
        row = next(line for line in table.splitlines() if "98.5" in line)
        assert ("-" not in row) is is_compared and "CI targets, not" not in speeds


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("version: 1", "version: 2", "version 2; allowed: 1"),
        ("version: 1\n", "", "version missing; allowed: 1"),
        ("bh_p150", "bh_p151", "unknown board; allowed: wh_n150"),
        ("20.3", "fast", "'fast' is no number"),
        ("20.3", "nan", "'nan' is no number"),
        ("batch_size: 1", "batch_size: inf", "batch_size: 'inf' is no number"),
        ("batch_size: 1", "batch_size: 1.5", "batch_size: 1.5; allowed: a whole number"),
        ("decode_t/s/u", "decode_tps", "unknown key 'decode_tps'; allowed: decode_t/s/u"),
        ("top1: 91", "top1: 910", "top1: 910; allowed: percent, up to 100"),
        ("top1: 91", "top-1: 91", "unknown key 'top-1'; allowed: top1, top5"),
        ("status: TODO", "status: off", "status off; allowed: active, TODO"),
        ("  tiny:", "  teeny:", "no model 'tiny'; allowed: other, teeny; did you mean 'teeny'?"),
    ],
)
def test_bad_targets_are_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "targets.yaml"
    path.write_text(TARGETS.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        read_targets(path, "tiny")
    assert said in str(caught.value)


PLAN = ("plan", "shape:tiny", "--context", "64", "--prompt", "32", "--boards", "p150")


@pytest.mark.parametrize(
    ("argv", "content", "said"),
    [
        (("plan", "shape:tiny", "--boards", "p151"), None, "unknown board 'p151'; allowed: n150"),
        (("bench", "--model", "shape:tiny", "--target", "p151"), None, "unknown target 'p151'"),
        ((*PLAN, "--precision"), {"version": 2, "default": "bfp_bf8"}, "unknown key 'version'"),
        ((*PLAN, "--precision"), {"default": {"dtype": "bfp_bf8"}}, "or only globs with bfp_bf4"),
        ((*PLAN, "--precision"), {"version": 2, "decoders": {"0": {}}}, "unknown key 'version'"),
        ((*PLAN, "--precision"), {"decoders": {"0": {}}}, "decoders.0: no settings; allowed"),
        (
            (*PLAN, "--precision"),
            {"decoders": {"0": {"precision": {}}}},
            "did you mean 'precision_",
        ),
        ((*PLAN, "--precision"), {"*.experts.*": "bf16"}, "matches no name of the model; allowed"),
        ((*PLAN, "--precision"), {"*.nothing": "bf16"}, "'*.nothing' matches no weight; allowed"),
        ((*PLAN, "--targets"), {"version": 2, "targets": {}}, "version 2; allowed: 1"),
        ((*PLAN, "--targets"), {"version": 1, "targets": {}}, "no model 'Tiny'"),
        (("trace", "shape:tiny"), None, "shape:tiny: has random weights"),
        (("trace", "smollm2", "--reference"), "shape:tiny", "shape:tiny: has random weights"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    argv: tuple[str, ...],
    content: object,
    said: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """JSON is YAML, too. A text is an argument, a map is a file."""
    given = (
        [content]
        if isinstance(content, str)
        else []
        if content is None
        else [written(tmp_path, content)]
    )
    assert main([*argv, *given]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert said in captured.err
