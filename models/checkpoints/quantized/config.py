"""The key ``quantization_config`` of a ``config.json``, or a file with it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.json_file import read_json

METHODS: Mapping[str, str] = {
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "mlx": "MLX",
    "modelopt": "modelopt",
    "mxfp4": "MXFP4",
    "torchao": "torchao",
}
"""Readable methods, and the name of their type in messages."""


MLX_MODELS = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose tensors in MLX have the names and values of Hugging Face."""


SIDE_FILES: Mapping[str, tuple[str, str]] = {
    "hf_quant_config.json": ("modelopt", "quantization"),
    "quantize_config.json": ("gptq", ""),
}
"""Files of older tools with the settings, their method, and the key of the settings, if any."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's ``config.json``, with the settings of a side file if it has none.

    Raises:
        CheckpointError: A file is not readable, or has another form.
    """
    values = read_json(folder / "config.json")
    file = side_file(folder, values)
    if file is None:
        return values
    method, key = SIDE_FILES[file.name]
    settings: Any = read_json(file)
    if key:
        settings = settings.get(key)
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file}: {key} = {str(settings)[:40]!r}; allowed: an object")
    if key and settings.get("quant_algo") is None:
        return values  # Only the cache is quantized.
    return {**values, "quantization_config": {"quant_method": method, **settings}}


def side_file(folder: Path, values: Mapping[str, object]) -> Path | None:
    """Return the side file with the settings, if ``config.json`` has none."""
    inner = values.get("text_config")
    places = (values, inner if isinstance(inner, Mapping) else {})
    keys = "quantization_config", "quantization"
    if any(place.get(key) is not None for place in places for key in keys):
        return None
    return next((folder / name for name in SIDE_FILES if (folder / name).is_file()), None)


def quantization_of(values: Mapping[str, object], where: str) -> Mapping[str, object] | None:
    """Return the ``quantization_config`` of a configuration or its ``text_config``, if any.

    Raises:
        CheckpointError: Two configurations that differ, no object, or an unknown method.
    """
    if (mlx := _mlx_of(values, where)) is not None:
        return mlx
    inner = values.get("text_config")
    key = "quantization_config"
    places = {key: values, f"text_config.{key}": inner if isinstance(inner, Mapping) else {}}
    found = {name: place[key] for name, place in places.items() if place.get(key) is not None}
    if not found:
        return None
    name, config = next(iter(found.items()))
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    if not isinstance(config, Mapping) or not isinstance(method, str) or method not in METHODS:
        raise CheckpointError(
            f"{where}: {name}.quant_method = {method!r} is not read; "
            f"allowed: {', '.join(METHODS)}, or unquantized weights"
        )
    if method == "mlx":
        _check_mlx_model(values, where)
    if any(other != config for other in found.values()):
        raise CheckpointError(
            f"{where}: quantization_config differs from text_config.quantization_config; "
            "allowed: equal objects, or one"
        )
    return config


def _mlx_of(values: Mapping[str, object], where: str) -> Mapping[str, object] | None:
    """Return the key ``quantization`` of MLX with a method, if any.

    Raises:
        CheckpointError: MLX stores the model's tensors in another form.
    """
    config = values.get("quantization")
    other = values.get("quantization_config")
    has_method = isinstance(other, Mapping) and "quant_method" in other
    if not isinstance(config, Mapping) or has_method:
        return None
    _check_mlx_model(values, where)
    return {**config, "quant_method": "mlx"}


def _check_mlx_model(values: Mapping[str, object], where: str) -> None:
    if values.get("model_type") not in MLX_MODELS:
        raise CheckpointError(
            f"{where}: quantization of MLX for model_type {str(values.get('model_type'))[:40]!r} "
            f"is not read; allowed: {', '.join(MLX_MODELS)}"
        )
