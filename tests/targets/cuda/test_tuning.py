"""Files of tuning values: one for each GPU, with the keys and types of the default."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tilewright.compiler.targets.cuda import tuning as tuning_module
from tilewright.compiler.targets.cuda.tuning import DEFAULT, file_of, tuning
from tilewright.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", DEFAULT),
        ("", DEFAULT),
    ],
)
def test_file_of_a_gpu_is_a_word_of_its_name(name: str, file: str, tmp_path: Path) -> None:
    for known in ("h200", "h100"):
        (tmp_path / f"{known}.json").write_text("{}")
    assert file_of(name, tmp_path) == file
    assert file_of("NVIDIA H100 80GB HBM3") == DEFAULT, "no file is measured on it"


def test_a_gpu_has_the_values_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = copy.deepcopy(tuning())
    values["experts"]["router_max_rows"] = 16
    (tmp_path / "other.json").write_text(json.dumps(values))
    monkeypatch.setattr(tuning_module, "gpu_name", lambda: "Made Up OTHER 9")
    assert tuning(folder=tmp_path)["experts"]["router_max_rows"] == 16


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("experts", "router_max_rows", "16", "wrong.json.experts.router_max_rows: '16'"),
        ("experts", "router_max_rows", True, "allowed: int"),
        ("experts", "unknown", 1, "wrong.json.experts: "),
        ("sampling", "argmax_chunk", None, "wrong.json.sampling.argmax_chunk: None"),
        ("attention", "rope_few_tokens", [1], "allowed: int"),
    ],
)
def test_a_file_with_another_key_or_type_is_an_error(
    section: str, key: str, value: Any, said: str, tmp_path: Path
) -> None:
    values = copy.deepcopy(tuning())
    values[section][key] = value
    (tmp_path / "wrong.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError) as error:
        tuning("wrong", tmp_path)
    assert said in str(error.value) and "; allowed: " in str(error.value)


def test_a_file_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cut\.json: .*; allowed: a JSON object"):
        tuning("cut", tmp_path)
