"""Tiny folders with quantized weights, and values by the schemes' formulas, value by value."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.models.conftest import tiny_hf_config, with_random_norms
from tests.tiny import prefill, random_tokens
from tilewright.compiler.driver import compile_model
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.errors import CheckpointError
from tilewright.models import load_model

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[np.ndarray, np.random.Generator], tuple[Tensors, np.ndarray]]
"""Make a module's stored tensors and its values. Names exclude the module's."""

UP = "model.layers.1.mlp.up_proj"
TOKENIZER = {
    "version": "1.0",
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    "decoder": {
        **{"type": "ByteLevel", "add_prefix_space": True},
        **{"trim_offsets": True, "use_regex": True},
    },
}


def tiny(**changes: Any) -> transformers.LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "vocab_size": 96}
    config = tiny_hf_config(**{**sizes, "initializer_range": 0.1, **changes})
    return with_random_norms(transformers.LlamaForCausalLM(config))


def write(
    folder: Path,
    quantize: Quantize | None,
    config: Mapping[str, Any],
    *,
    skip: str = "lm_head",
    change: Callable[[Tensors], None] = lambda _: None,
    sizes: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Write a folder with quantized linear layers, and return all weights' values."""
    folder.mkdir(parents=True, exist_ok=True)
    model, rng = tiny(**(sizes or {})), np.random.default_rng(5)
    tensors: Tensors = {}
    values = {}
    for name, weight in model.named_parameters():
        dense = weight.detach()
        if quantize is None or dense.ndim != 2 or "embed" in name or skip in name:
            tensors[name], values[name] = dense, dense.numpy()
            continue
        stored, values[name] = quantize(dense.numpy(), rng)
        tensors |= {f"{name.removesuffix('weight')}{key}": part for key, part in stored.items()}
    change(tensors)
    save_file(
        {name: each.clone().contiguous() for name, each in tensors.items()},
        folder / "model.safetensors",
    )
    key = "quantization_config" if "quant_method" in config else "quantization"  # of MLX
    said = {**model.config.to_dict(), key: dict(config) or None}
    (folder / "config.json").write_text(json.dumps(said))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return values


def change(name: str, tensor: torch.Tensor | None) -> Callable[[Tensors], None]:
    """Replace or remove the up projection's tensor."""

    def run(tensors: Tensors) -> None:
        tensors.pop(f"{UP}.{name}", None)
        if tensor is not None:
            tensors[f"{UP}.{name}"] = tensor

    return run


def check_refused(
    folder: Path,
    quantize: Quantize,
    config: Mapping[str, Any],
    change: Callable[[Tensors], None],
    words: str,
) -> None:
    """Check that a changed folder is refused in one line with these words."""
    write(folder, quantize, config, change=change)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def write_dense(folder: Path, values: Mapping[str, np.ndarray]) -> None:
    """Write the same model with these float32 weights."""

    def dense(tensors: Tensors) -> None:
        for name, each in values.items():
            tensors[name] = torch.from_numpy(np.ascontiguousarray(each))

    write(folder, None, {}, change=dense)


def check_values(folder: Path, values: Mapping[str, np.ndarray]) -> None:
    """Compare the bits of every weight: whole, by rows and by columns."""
    checkpoint: Any = load_model(folder).checkpoint
    assert set(checkpoint.names) == set(values)
    for name, expected in values.items():
        got = checkpoint.get(name)
        assert got.dtype == torch.float32 and got.shape == expected.shape
        assert np.array_equal(got.numpy().view(np.uint32), expected.view(np.uint32)), name
        if name in checkpoint._quantized:
            with torch.device("meta"):  # for random weights
                assert torch.equal(checkpoint.get(name), got)
        for rows in (slice(3, 20), slice(-9, None)):
            assert torch.equal(checkpoint.get(name, rows), got[rows])
        if got.ndim == 2:
            assert torch.equal(checkpoint.get(name, slice(5, 9), slice(7, 40)), got[5:9, 7:40])


def check_logits(folder: Path, dense: Path) -> None:
    """Compare with the dense folder under ``stored``: the reference's bits, the CPU within 1e-5."""
    tokens, found = random_tokens(9, vocab_size=96), {}
    for path, precision, target in (
        (dense, "reference", "reference"),
        (folder, "stored", "reference"),
        (folder, "stored", "cpu"),
    ):
        options = CompileOptions(max_context=32, compute="exact", num_threads=1)
        model = load_model(path)
        compiled = compile_model(model, load_precision(precision), target=target, options=options)
        found[path, target] = prefill(compiled.executable, tokens)
        compiled.executable.close()
    wanted = found[dense, "reference"]
    assert torch.equal(found[folder, "reference"], wanted)
    distance = (found[folder, "cpu"] - wanted).abs().max() / wanted.abs().max()
    assert distance < 1e-5


def e4m3(byte: int) -> float:
    """Return an FP8 byte's value from its fields."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


E4M3 = np.array([e4m3(byte) for byte in range(256)], np.float32)
"""Values by byte. NaN bytes 0x7F and 0xFF are numbers here."""
