"""bench-engine on a CPU: what it measures beside an engine, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.engine import command as bench
from bench.engine.command import main
from bench.engine.compiled import CASES, EAGER, Asked, run
from tests.targets.cuda.engine.conftest import CONFIG, engine_file, plan
from tilewright.compiler.errors import ConfigError
from tilewright.compiler.targets.cuda.engine.parts.self_test import random_weights
from tilewright.compiler.targets.cuda.engine.parts.settings import read_settings

__all__ = ["engine_file", "plan"]

CPU = torch.device("cpu")


def test_an_engine_is_measured_beside_eager_torch(engine_file: Path, tmp_path: Path) -> None:
    config, output = tmp_path / "config.json", tmp_path / "found.json"
    config.write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    argv = [str(engine_file), "--config", str(config), "--device", "cpu", "--output", str(output)]
    argv += ["--scale", "16", "--repeats", "1", "--operations", "3", "--engines", "2"]
    assert main([*argv, "--parts", "eager", "operations", "memory"]) == 0
    found = json.loads(output.read_text())
    tables = [found["ours"]["cases"], *found["eager"].values()]
    for table in tables:
        assert all(each["ms"] > 0 and each["error"] < 0.01 for each in table.values())
        assert table["mixed"]["decode_tokens_per_s"] > 0
        assert "decode_tokens_per_s" not in table["prefill 4 x 128"]
    assert max(found["operations"]["worst"]) < 0.01
    assert found["memory"] == {"after_remove": [0, 0], "after_del": [0, 0]}


def test_torch_compile_has_the_logits_of_the_reference(tmp_path: Path) -> None:
    """Traced alone: what inductor makes of it takes a minute here."""
    config = {**CONFIG, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(random_weights(read_settings(config, CPU), 0), tmp_path / "model.pt")
    for case in ("prefill 4 x 128", "mixed"):
        asked = Asked(
            case=case,
            config=str(tmp_path / "config.json"),
            weights=str(tmp_path),
            device="cpu",
            mode=EAGER,
            scale=16,
            repeats=1,
        )
        found = run(asked)
        assert found["error"] < 0.01 and found["ms"] > 0


def test_a_table_comes_out_whatever_torch_compile_takes(engine_file: Path, tmp_path: Path) -> None:
    config, output = tmp_path / "config.json", tmp_path / "found.json"
    config.write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    argv = [str(engine_file), "--config", str(config), "--device", "cpu", "--output", str(output)]
    argv += ["--scale", "16", "--repeats", "1", "--parts", "compiled", "--compiled-seconds", "0.4"]
    assert main(argv) == 0
    found = json.loads(output.read_text())
    assert found["ours"]["cases"]["mixed"]["ms"] > 0
    assert len(found["compiled"]) == len(CASES)
    first, *others = (each["failed"] for each in found["compiled"].values())
    assert first.startswith("not compiled and measured in 0.")
    assert all(each.startswith("not begun: those before it took all") for each in others)


def test_a_case_of_torch_compile_has_all_the_time_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, given = [0.0], dict[str, float]()

    def in_child(asked: Asked, seconds: float) -> dict[str, Any]:
        given[asked.case] = seconds
        clock[0] += min(seconds, 100.0)
        return {"ms": 1.0} if seconds >= 100 else {"failed": "in time"}

    monkeypatch.setattr(bench, "_in_child", in_child)
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    asked: Any = SimpleNamespace(
        given=bench._Arguments(), folder=str(tmp_path), config=CONFIG, found={}, _write=lambda: None
    )
    found = bench._Measured._compiled(asked)
    decodes = ["decode 8 x 32 + 16", "decode 8 x 128 + 16"]
    assert [*found] == [*CASES] and given == dict(zip(decodes, (150.0, 50.0), strict=True))
    assert found[decodes[0]] == {"ms": 1.0}, "one compilation has the time for a figure"
    assert {found[case]["failed"] for case in [*CASES][2:]} == {bench._NOT_BEGUN}


def test_a_child_finds_what_this_process_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the package is found through PYTHONPATH alone, too."""
    (tmp_path / "tilewright").mkdir()
    for name in ("__init__.py", "found_there_alone.py"):
        (tmp_path / "tilewright" / name).write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = "import bench.engine, tilewright.found_there_alone; print('{\"ms\": 1}')"
    monkeypatch.setattr(bench, "command", lambda asked: ["-c", said])
    asked: Any = None
    assert bench._in_child(asked, 30) == {"ms": 1}


@pytest.mark.parametrize(
    ("argv", "said"),
    [([], "no engine; allowed"), (["x.py", "--config", "nowhere.json"], "nowhere.json: ")],
)
def test_mistakes_are_refused(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        main(argv)
