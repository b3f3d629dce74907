"""FP8 folders: values by the formula bit for bit, logits, and folders that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.models.quantized.folders import (
    E4M3,
    UP,
    Quantize,
    Tensors,
    check_logits,
    check_refused,
    check_values,
    write,
    write_dense,
)
from tests.models.test_experts_folder import rewritten, saved, together
from tests.models.test_experts_gguf import make
from tilewright.compiler.driver import weight_source
from tilewright.compiler.formats import FP8, stored_format
from tilewright.errors import CheckpointError
from tilewright.models import check_header, load_model, quantised_types
from tilewright.models.checkpoints.containers import open_checkpoint


def quantizer(
    block: tuple[int, int] | None = None,
    *,
    by_row: bool = False,
    scale: str = "weight_scale_inv",
    dtype: torch.dtype = torch.float32,
) -> Quantize:
    """``block``: rows and columns of a scale; None: all, or all columns of a row."""

    def run(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        rows, columns = weight.shape
        height, width = block or (1 if by_row else rows, columns)
        codes = rng.integers(0, 126, (rows, columns), np.uint8) | (rng.integers(0, 2) << 7)
        codes = codes.astype(np.uint8)
        grid = -(-rows // height), -(-columns // width)
        numbers = torch.from_numpy(rng.uniform(1e-4, 1e-3, grid).astype(np.float32))
        exponents = torch.from_numpy(rng.integers(115, 121, grid).astype(np.uint8))
        is_power = dtype == torch.float8_e8m0fnu
        scales = exponents.view(dtype) if is_power else numbers.to(dtype)
        factors = np.exp2(exponents.numpy() - 127.0) if is_power else scales.double().numpy()
        factors = factors.repeat(height, axis=0).repeat(width, axis=1)[:rows, :columns]
        values = (E4M3[codes].astype(np.float64) * factors).astype(np.float32)
        stored = scales if block or by_row else scales.reshape(())
        return {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), scale: stored}, values

    return run


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SMALL = {**BLOCKS, "weight_block_size": [48, 80]}
FLOATS = {
    **{"quant_method": "compressed-tensors", "format": "float-quantized"},
    "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
}
GRID = {
    **{"num_bits": 8, "type": "float", "strategy": "block"},
    "block_structure": [64, 32],
}
GRIDS = {**FLOATS, "config_groups": {"g": {"targets": ["Linear"], "weights": GRID}}}
BF16: dict[str, Any] = {"scale": "weight_scale", "dtype": torch.bfloat16}
TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
CASES: dict[str, tuple[Quantize, dict[str, Any], str]] = {
    "blocks": (quantizer((128, 128)), BLOCKS, "FP8 128x128"),
    "partial blocks": (quantizer((48, 80)), SMALL, "FP8 48x80"),
    "bf16 scales": (quantizer((128, 128), dtype=torch.bfloat16), BLOCKS, "FP8 128x128"),
    "exponents": (
        quantizer((128, 128), dtype=torch.float8_e8m0fnu),
        BLOCKS,
        "FP8 128x128, powers of two",
    ),
    "tensor": (quantizer(), TENSOR, "FP8 per tensor"),
    "compressed tensor": (quantizer(**BF16), FLOATS, "FP8 per tensor"),
    "compressed rows": (quantizer(by_row=True, **BF16), FLOATS, "FP8 per channel"),
    "compressed blocks": (quantizer((64, 32), **BF16), GRIDS, "FP8 64x32"),
    "modelopt": (
        quantizer(scale="weight_scale"),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        "FP8 per tensor",
    ),
    "tensor, other name": (quantizer(scale="weight_scale"), TENSOR, "FP8 per tensor"),
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_the_formulas_bit_for_bit(case: str, tmp_path: Path) -> None:
    quantize, config, label = CASES[case]
    values = write(tmp_path / "m", quantize, config)
    check_values(tmp_path / "m", values)
    checkpoint = load_model(tmp_path / "m").checkpoint
    assert checkpoint.stored_type(f"{UP}.weight") == label
    assert checkpoint.stored_type("model.norm.weight") == "F32"
    check_header(tmp_path / "m")
    method = str(config["quant_method"])
    assert quantised_types(tmp_path / "m") == ("FP8" if method == "fp8" else method,)


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("block", [(128, 128), (64, 32)])
def test_blocks_have_the_values_of_transformers(
    block: tuple[int, int], scale_fmt: str, tmp_path: Path
) -> None:
    """Transformers writes the configuration, quantizes, and dequantizes in float32."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = transformers.FineGrainedFP8Config(weight_block_size=block, scale_fmt=scale_fmt)
    quantizer: Any = SimpleNamespace(quantization_config=config)
    settings = json.loads(json.dumps(config.to_dict(), default=str))

    def run(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        whole = torch.from_numpy(weight)
        found = Fp8Quantize(quantizer)._quantize_one("x.weight", whole.repeat(2, 1)[:128])
        stored = {name.removeprefix("x."): tensor for name, tensor in found.items()}
        values = Fp8Dequantize(quantizer)._dequantize_one(
            stored["weight"], stored["weight_scale_inv"], output_dtype=torch.float32
        )
        return stored, values.numpy()

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4}
    check_values(tmp_path / "m", write(tmp_path / "m", run, settings, sizes=sizes))


@pytest.mark.parametrize("case", ["partial blocks", "blocks"])
def test_logits_are_those_of_dense_values(case: str, tmp_path: Path) -> None:
    quantize, config, _ = CASES[case]
    write_dense(tmp_path / "dense", write(tmp_path / "m", quantize, config))
    check_logits(tmp_path / "m", tmp_path / "dense")


@pytest.mark.parametrize("case", CASES)
def test_blocks_of_128_columns_are_stored_as_codes(case: str, tmp_path: Path) -> None:
    quantize, config, label = CASES[case]
    values = write(tmp_path / "m", quantize, config)
    model, name = load_model(tmp_path / "m"), f"{UP}.weight"
    is_exact = label not in ("FP8 48x80", "FP8 64x32")
    assert stored_format(label) == ("fp8" if is_exact else None)
    if is_exact:
        stored = weight_source(model).stored(name, 3, 150)
        found = FP8.unpack(stored.flatten(), (147, 128))
        expected = torch.from_numpy(values[name][3:150])
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("case", ["blocks", "exponents", "partial blocks"])
def test_codes_that_are_no_numbers_are_refused_by_name(case: str, tmp_path: Path) -> None:
    codes = torch.full((192, 128), 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn)
    write(tmp_path / "m", *CASES[case][:2], change=put(f"{UP}.weight", codes))
    model = load_model(tmp_path / "m")
    for read in (model.checkpoint.get, lambda name: weight_source(model).stored(name, 0, 8)):
        with pytest.raises(CheckpointError, match=rf"{UP}.weight has NaN; allowed: finite values"):
            read(f"{UP}.weight")


def without(name: str) -> Callable[[Tensors], None]:
    def run(tensors: Tensors) -> None:
        del tensors[name]

    return run


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensor})


INV = f"{UP}.weight_scale_inv"


def stack(*shape: int) -> Callable[[Tensors], None]:
    def run(tensors: Tensors) -> None:
        name = "model.layers.0.mlp.experts.down_proj"
        tensors[name] = torch.zeros(shape).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1)

    return run


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (without(INV), {}, rf"{INV} is missing; allowed: F32"),
        (stack(5000, 1, 1), {}, r"down_proj has shape \[5000, 1, 1\]; .* \(up to 4096\)"),
        (stack(7, 0, 0), {}, r"down_proj has shape \[7, 0, 0\]; .* \(up to 4096\)"),
        (put(INV, torch.ones(3, 1)), {}, r"is F32 \[3, 1\]; allowed: .*\[2, 1\]"),
        (put(INV, torch.ones(2, 1, dtype=torch.int64)), {}, r"is I64 \[2, 1\]; allowed: F32"),
        (
            put(f"{UP}.g_idx", torch.ones(3)),
            {},
            "g_idx .* is not part of the model .*; allowed: the model's tensors only",
        ),
        (put("lm_head.weight", torch.ones(96, 128, dtype=torch.int8)), {}, "has type I8, which"),
        (lambda _: None, {"weight_block_size": [128]}, "weight_block_size = .*two sizes"),
        (lambda _: None, {"weight_block_size": [64, 64]}, r"is F32 \[1, 2\]; allowed: .*\[2, 3\]"),
        (lambda _: None, {"fmt": "e5m2"}, "fmt = 'e5m2'; allowed: e4m3"),
        (
            lambda _: None,
            {"quant_method": "quip"},
            "quant_method = 'quip' is not read; allowed: auto-round",
        ),
    ],
)
def test_folders_that_do_not_fit_are_refused(
    change: Callable[[Tensors], None], config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    check_refused(tmp_path / "m", quantizer((128, 128)), {**BLOCKS, **config}, change, words)


@pytest.mark.parametrize("shape", [(0, 128), (192, 0)])
@pytest.mark.parametrize("case", ["blocks", "tensor", "compressed tensor"])
def test_codes_without_rows_or_columns_are_refused(
    case: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    change = put(f"{UP}.weight", torch.zeros(shape).to(torch.float8_e4m3fn))
    check_refused(tmp_path / "m", *CASES[case][:2], change, "allowed: F8_E4M3 of two axes, not em")


def test_scales_that_are_no_numbers_are_refused_by_name(tmp_path: Path) -> None:
    write(
        tmp_path / "m",
        quantizer((128, 128)),
        BLOCKS,
        change=put(INV, torch.tensor([[1.0], [torch.inf]])),
    )
    checkpoint = load_model(tmp_path / "m").checkpoint
    for read in (checkpoint.get, checkpoint.stored_type):
        with pytest.raises(CheckpointError, match=f"{INV} has a scale that is inf or NaN"):
            read(f"{UP}.weight")


def test_a_config_without_quantized_weights_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "m", None, BLOCKS)
    with pytest.raises(CheckpointError, match="no tensor is quantized"):
        load_model(tmp_path / "m")


def test_scales_of_activations_are_said_and_not_used(tmp_path: Path) -> None:
    def static(tensors: Tensors) -> None:
        tensors[f"{UP}.activation_scale"] = torch.ones(())

    write(tmp_path / "m", quantizer(), TENSOR, change=static)
    checkpoint: Any = load_model(tmp_path / "m").checkpoint
    assert ["activations are quantized to FP8" in note for note in checkpoint.notes] == [True]


def test_stacked_experts_have_the_values_of_separate_experts(tmp_path: Path) -> None:
    def coded(tensors: Tensors) -> Tensors:
        stacked = together(tensors)
        for name in [name for name in stacked if name.endswith("_proj")]:
            experts = torch.arange(len(stacked[name])) + 1.0
            stacked[f"{name}_scale_inv"] = 0.01 * experts.view(-1, 1, 1)
            stacked[name] = (stacked[name] * 100).to(torch.float8_e4m3fn)
        expected.update(stacked)
        return stacked

    expected: Tensors = {}
    folder = rewritten(saved(make("qwen3_moe"), tmp_path), coded)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": BLOCKS}))
    checkpoint = open_checkpoint(folder)
    for part in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{part}"
        codes, scales = expected[name].float(), expected[f"{name}_scale_inv"]
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for expert, values in enumerate(codes * scales):
            for own, rows in zip(names, values.chunk(len(names)), strict=True):
                if name in checkpoint.names:
                    stacked = checkpoint.get(name)[expert]
                    assert torch.equal(stacked, values)
                else:
                    got = checkpoint.get(f"model.layers.0.mlp.experts.{expert}.{own}.weight")
                    assert torch.equal(got, rows)
