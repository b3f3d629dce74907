"""Files of tuning values: one for each GPU, with the keys and types of the default."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tilewright.compiler.targets.cuda.tuning import DEFAULT, tuning
from tilewright.errors import ConfigError


def test_a_gpu_without_a_file_has_the_default_values() -> None:
    assert tuning("rtx 4090") == tuning(DEFAULT)


def test_a_gpu_has_the_values_of_its_file(tmp_path: Path) -> None:
    values = copy.deepcopy(tuning())
    values["experts"]["router_max_rows"] = 16
    (tmp_path / "other.json").write_text(json.dumps(values))
    assert tuning("other", tmp_path)["experts"]["router_max_rows"] == 16


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
