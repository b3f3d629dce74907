"""What ONNX Runtime GenAI's builder is given, and what is said where it fails."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.peers import onnx_folder
from bench.peers.onnx_folder import build, hf_config
from tests.tiny import tiny_config
from tilewright.errors import ConfigError
from tilewright.models.config import Llama3Scaling


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "phi3"},
        {"mlp_bias": True},
        {"attention_bias": True},
        {"rope": dataclasses.replace(tiny_config().rope, freq_factors=(1.0,) * 8)},
        {
            "rope": dataclasses.replace(
                tiny_config().rope, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)
            )
        },
    ],
)
def test_what_config_json_cannot_say_is_refused(changes: dict[str, object]) -> None:
    tokenizer = SimpleNamespace(bos_id=None, eos_ids=(1,))
    sound = SimpleNamespace(config=tiny_config(), checkpoint=None, tokenizer=tokenizer)
    assert hf_config(sound)["eos_token_id"] == [1]
    with pytest.raises(ConfigError):
        hf_config(
            SimpleNamespace(config=tiny_config(**changes), checkpoint=None, tokenizer=tokenizer)
        )


def fail_with(monkeypatch: pytest.MonkeyPatch, *, said: str, code: int = 1) -> None:
    script = f"import sys; sys.stderr.write({said!r}); sys.exit({code})"
    monkeypatch.setattr(onnx_folder, "_BUILD", (sys.executable, "-c", script))


def test_a_failed_build_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fail_with(monkeypatch, said="Traceback ...\nValueError: no\n\n")
    with pytest.raises(ConfigError, match=r"failed: ValueError: no$"):
        build(tmp_path, tmp_path / "out", scratch=tmp_path)
    fail_with(monkeypatch, said="ModuleNotFoundError: No module named 'onnx_ir'")
    with pytest.raises(ConfigError, match="pip install onnx-ir transformers"):
        build(tmp_path, tmp_path / "out", scratch=tmp_path)
    fail_with(monkeypatch, said="", code=9)
    with pytest.raises(ConfigError, match="exit code 9"):
        build(tmp_path, tmp_path / "out", scratch=tmp_path)
