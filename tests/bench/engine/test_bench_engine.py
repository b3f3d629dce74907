"""bench-engine on a CPU: what it measures beside an engine, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engine import command as bench
from bench.engine.command import main
from bench.engine.compiled import CASES, EAGER, Asked, CompiledReference, run
from tests.targets.cuda.engine_generator.conftest import CONFIG, engine_file, plan
from tilewright.compiler.targets.cuda.engine_generator.parts.self_test import random_weights
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import read_settings
from tilewright.errors import ConfigError

__all__ = ["engine_file", "plan"]

CPU = torch.device("cpu")


def test_an_engine_is_measured_beside_eager_torch(engine_file: Path, tmp_path: Path) -> None:
    config, output = tmp_path / "config.json", tmp_path / "found.json"
    config.write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    argv = [str(engine_file), "--config", str(config), "--device", "cpu", "--output", str(output)]
    argv += ["--scale", "16", "--repeats", "1", "--operations", "3", "--engines", "2"]
    argv += ["--seeds", "2"]
    assert main([*argv, "--parts", "eager", "operations", "memory"]) == 0
    found = json.loads(output.read_text())
    tables = [found["ours"]["cases"], *found["eager"].values()]
    for table in tables:
        assert all(each["ms"] > 0 and each["error"] < 0.01 for each in table.values())
        assert table["mixed"]["decode_tokens_per_s"] > 0
        assert "decode_tokens_per_s" not in table["prefill 4 x 128"]
    for name in ("worst", "worst_of_cases"):
        assert len(found["operations"][name]) == 2 and max(found["operations"][name]) < 0.01
    assert found["memory"] == {"after_remove": [0, 0], "after_del": [0, 0]}


def test_torch_compile_has_the_logits_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced alone: what inductor makes of it takes a minute here."""
    config = {**CONFIG, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(random_weights(read_settings(config, CPU), 0), tmp_path / "model.pt")
    asked = Asked(
        config=str(tmp_path / "config.json"),
        weights=str(tmp_path),
        device="cpu",
        mode=EAGER,
        scale=16,
        repeats=1,
    )
    shapes, step = set(), CompiledReference._step

    def seen(self: Any, layer: Any, tokens: Any, *given: Any) -> Any:
        shapes.add((layer is self._compiled, tuple(tokens.shape)))
        return step(self, layer, tokens, *given)

    monkeypatch.setattr(CompiledReference, "_step", seen)
    found = dict(run(asked))
    assert [*found] == [*CASES]
    assert all(each["error"] < 0.01 and each["ms"] > 0 for each in found.values())
    compiled = {shape for is_compiled, shape in shapes if is_compiled}
    assert compiled == {(8, 1), (4, 8)}, "a shape takes its time to compile"


def test_a_table_comes_out_whatever_torch_compile_takes(engine_file: Path, tmp_path: Path) -> None:
    config, output = tmp_path / "config.json", tmp_path / "found.json"
    config.write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    argv = [str(engine_file), "--config", str(config), "--device", "cpu", "--output", str(output)]
    argv += ["--scale", "16", "--repeats", "1", "--parts", "compiled", "--compiled-seconds", "0.4"]
    assert main(argv) == 0
    found = json.loads(output.read_text())
    assert found["ours"]["cases"]["mixed"]["ms"] > 0
    assert found["compiled"].pop("mode") == "max-autotune-no-cudagraphs", "what it is, is said"
    assert len(found["compiled"]) == len(CASES)
    first, *others = (each["failed"] for each in found["compiled"].values())
    assert first.startswith("not compiled and measured in 0.4 s; last said: ")
    assert set(others) == {bench._NOT_BEGUN}


def test_what_torch_compile_measured_in_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, *_ = CASES
    code = (
        "import json, sys, time; print(json.dumps([sys.argv[1], {'ms': 1}]), flush=True);"
        "print('tokens [8, 1]: being made', file=sys.stderr, flush=True); time.sleep(60)"
    )
    monkeypatch.setattr(bench, "command", lambda asked: ["-c", code, one])
    asked: Any = None
    found = dict(bench._in_child(asked, 2))
    assert [*found] == [*CASES] and found[one] == {"ms": 1}
    assert found[two]["failed"].startswith("not compiled and measured in 2.0 s; last said: ")
    assert {found[case]["failed"] for case in [*CASES][2:]} == {bench._NOT_BEGUN}


def test_a_child_finds_what_this_process_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the package is found through PYTHONPATH alone, too."""
    (tmp_path / "tilewright").mkdir()
    for name in ("__init__.py", "found_there_alone.py"):
        (tmp_path / "tilewright" / name).write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = (
        "import json, sys, bench.engine, tilewright.found_there_alone;"
        "[print(json.dumps([case, {'ms': 1}])) for case in sys.argv[1:]]"
    )
    monkeypatch.setattr(bench, "command", lambda asked: ["-c", said, *CASES])
    asked: Any = None
    assert dict(bench._in_child(asked, 30)) == {case: {"ms": 1} for case in CASES}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "no engine; allowed"),
        (["x.py", "--config", "nowhere.json"], "nowhere.json: "),
        (["x.py", "--device", "foo"], "device 'foo'; allowed: cuda, cuda:N, cpu"),
        (["x.py", "--operations", "0"], "'0'; allowed: integers, 1 or more"),
        (["x.py", "--compiled-seconds", "0"], "'0'; allowed: numbers, above 0"),
        (["x.py", "--mode", "fast"], "invalid choice: 'fast'"),
        (["x.py", "--output", "."], "is a folder; allowed: a file's path"),
        (["x.py", "--device", "cuda:99"], "--device cuda:99; GPUs that torch finds here: "),
        (["nowhere.py", "--device", "cpu"], "nowhere.py: .*; allowed: a generated engine.py"),
    ],
)
def test_mistakes_are_refused(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        main(argv)
