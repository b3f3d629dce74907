"""Folders whose quantization is in a file of an older tool, and not in config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.quantized import test_float4, test_float8, test_integers
from tests.models.quantized.folders import UP, check_values, write
from tilewright.errors import CheckpointError
from tilewright.models import check_header, load_model, model_files, quantised_types

CASES: dict[str, tuple[Any, str, str]] = {
    "gptq": (test_integers.CASES["gptq 4"], "quantize_config.json", "GPTQ"),
    "modelopt nvfp4": (test_float4.CASES["nvfp4 modelopt"], "hf_quant_config.json", "modelopt"),
    "modelopt fp8": (test_float8.CASES["modelopt"], "hf_quant_config.json", "modelopt"),
}


def moved(folder: Path, file: str) -> None:
    """Move the settings out of config.json, without the method."""
    values = json.loads((folder / "config.json").read_text())
    own = values.pop("quantization_config")
    del own["quant_method"]
    (folder / "config.json").write_text(json.dumps(values))
    whole = own if file == "quantize_config.json" else {"producer": {}, "quantization": own}
    (folder / file).write_text(json.dumps(whole))


@pytest.mark.parametrize("case", CASES)
def test_settings_in_a_side_file_are_read(case: str, tmp_path: Path) -> None:
    (quantize, config, label), file, method = CASES[case]
    folder = tmp_path / "m"
    values = write(folder, quantize, config)
    moved(folder, file)
    check_header(folder)
    assert quantised_types(folder) == (method,)
    checkpoint: Any = load_model(folder).checkpoint
    assert checkpoint.stored_type(f"{UP}.weight") == label
    assert folder / file in checkpoint.files and folder / file in model_files(folder)
    check_values(folder, values)
    before = checkpoint.content_hash()
    (folder / file).write_text((folder / file).read_text() + " ")
    assert load_model(folder).checkpoint.content_hash() != before


def test_settings_in_config_json_come_first(tmp_path: Path) -> None:
    (quantize, config, _), _, _ = CASES["modelopt fp8"]
    values = write(tmp_path / "m", quantize, config)
    (tmp_path / "m" / "quantize_config.json").write_text('{"bits": 4}')
    check_values(tmp_path / "m", values)


def test_a_side_file_for_the_cache_alone_leaves_weights_dense(tmp_path: Path) -> None:
    write(tmp_path / "m", None, {"quant_method": "gptq"})
    moved(tmp_path / "m", "hf_quant_config.json")
    settings = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "m" / "hf_quant_config.json").write_text(json.dumps(settings))
    assert quantised_types(tmp_path / "m") == ()
    load_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("hf_quant_config.json", "{}", "hf_quant_config.json: quantization = 'None'; allowed: an"),
        ("hf_quant_config.json", "[]", "hf_quant_config.json: has a list; allowed: a JSON ob"),
        ("quantize_config.json", "{", "quantize_config.json: not JSON"),
        ("quantize_config.json", '{"bits": 5}', "quantization_config.bits = 5; allowed: 2, 3"),
        ("quantize_config.json", '{"bits": 4}', "no tensor is quantized; allowed: .*, hf_quant"),
    ],
)
def test_side_files_that_do_not_fit_are_refused(
    file: str, text: str, words: str, tmp_path: Path
) -> None:
    write(tmp_path / "m", None, {"quant_method": "gptq"})
    moved(tmp_path / "m", file)
    (tmp_path / "m" / file).write_text(text)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_model(tmp_path / "m")
    assert "\n" not in str(caught.value)
