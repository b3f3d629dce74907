"""bench-engine on a CPU: what it measures beside an engine, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.engine.command import main
from tests.targets.cuda.engine_generator.conftest import CONFIG, engine_file, plan
from tilewright.errors import ConfigError

__all__ = ["engine_file", "plan"]


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


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "no engine; allowed"),
        (["x.py", "--config", "nowhere.json"], "nowhere.json: "),
        (["x.py", "--device", "foo"], "device 'foo'; allowed: cuda, cuda:N, cpu"),
        (["x.py", "--operations", "0"], "'0'; allowed: integers, 1 or more"),
        (["x.py", "--output", "."], "is a folder; allowed: a file's path"),
        (["x.py", "--device", "cuda:99"], "--device cuda:99; GPUs that torch finds here: "),
        (["nowhere.py", "--device", "cpu"], "nowhere.py: .*; allowed: a generated engine.py"),
    ],
)
def test_mistakes_are_refused(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        main(argv)
