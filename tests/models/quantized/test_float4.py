"""FP4 folders: values by the formula bit for bit, logits, and folders that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.quantized.folders import (
    E4M3,
    UP,
    Quantize,
    Tensors,
    change,
    check_logits,
    check_refused,
    check_values,
    write,
    write_dense,
)
from tests.models.quantized.test_float8 import FLOATS
from tilewright.compiler.formats import stored_format
from tilewright.errors import CheckpointError
from tilewright.models import load_model


def e2m1(code: int) -> float:
    """The value of a code, by the definition of its fields."""
    exponent, mantissa = code >> 1 & 3, code & 1
    value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -value if code >> 3 else value


E2M1 = np.array([e2m1(code) for code in range(16)])


def quantizer(names: tuple[str, str, str | None], *, divides: bool = False) -> Quantize:
    """``names``: codes, scales and the global scale of NVFP4, or None of MXFP4."""

    def run(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        rows, columns = weight.shape
        codes = rng.integers(0, 16, weight.shape, np.uint8)
        stored = {names[0]: torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)}
        block = 32 if names[2] is None else 16
        if names[2] is None:
            scales = rng.integers(119, 124, (rows, columns // block), np.uint8)
            stored[names[1]] = torch.from_numpy(scales)
            factors = np.exp2(scales - 127.0)
        else:
            scales = rng.integers(1, 126, (rows, columns // block), np.uint8)
            stored[names[1]] = torch.from_numpy(scales).view(torch.float8_e4m3fn)
            second = np.float32(rng.uniform(1e-4, 1e-3) ** (-1 if divides else 1))
            stored[names[2]] = torch.tensor([second]) if divides else torch.tensor(second)
            factors = E4M3[scales] / second if divides else E4M3[scales] * second
            assert factors.dtype == np.float32
        values = E2M1[codes] * factors.astype(np.float64).repeat(block, axis=1)
        return stored, values.astype(np.float32)

    return run


COMPRESSED = "weight_packed", "weight_scale", "weight_global_scale"
MODELOPT = {"quant_method": "modelopt", "quant_algo": "nvfp4", "group_size": 16}
GROUPS = {"g": {"weights": {"num_bits": 4, "type": "float"}}}
NV = {**FLOATS, "config_groups": GROUPS, "format": "nvfp4-pack-quantized"}
MX = {**NV, "format": "mxfp4-pack-quantized"}
CASES: dict[str, tuple[Quantize, dict[str, Any], str]] = {
    "nvfp4": (quantizer(COMPRESSED, divides=True), NV, "NVFP4 1x16"),
    "nvfp4 modelopt": (
        quantizer(("weight", "weight_scale", "weight_scale_2")),
        MODELOPT,
        "NVFP4 1x16",
    ),
    "mxfp4": (quantizer((*COMPRESSED[:2], None)), MX, "MXFP4"),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_logits_are_the_formulas(case: str, tmp_path: Path) -> None:
    quantize, config, label = CASES[case]
    values = write(tmp_path / "m", quantize, config)
    check_values(tmp_path / "m", values)
    assert load_model(tmp_path / "m").checkpoint.stored_type(f"{UP}.weight") == label
    assert stored_format(label) == {"MXFP4": "bf16", "NVFP4 1x16": "nvfp4"}[label]
    write_dense(tmp_path / "dense", values)
    check_logits(tmp_path / "m", tmp_path / "dense")


@pytest.mark.parametrize(
    ("case", "damage", "config", "words"),
    [
        ("nvfp4", change("weight_global_scale", None), {}, "global_scale is missing; allowed: F32"),
        ("nvfp4", change("weight_scale", torch.ones(192, 8)), {}, "is F32 .*allowed: F8_E4M3"),
        ("mxfp4", change("weight_scale", None), {}, r"weight_scale is missing; allowed: U8"),
        ("nvfp4 modelopt", change("pre_quant_scale", torch.ones(3)), {}, "scales activations"),
        ("nvfp4 modelopt", change("x", None), {"quant_algo": "INT4"}, "= 'INT4'; allowed: NVFP4"),
    ],
)
def test_folders_that_do_not_fit_are_refused(
    case: str,
    damage: Callable[[Tensors], None],
    config: dict[str, Any],
    words: str,
    tmp_path: Path,
) -> None:
    quantize, own, _ = CASES[case]
    check_refused(tmp_path / "m", quantize, {**own, **config}, damage, words)


@pytest.mark.parametrize("case", ["nvfp4", "nvfp4 modelopt"])
@pytest.mark.parametrize("second", [0.0, -0.0, -2.0, torch.nan, torch.inf, -torch.inf])
def test_second_scales_that_are_no_scales_are_refused(
    case: str, second: float, tmp_path: Path
) -> None:
    """Their packages compute it from largest magnitudes, so it is above 0."""
    quantize, config, _ = CASES[case]
    name = "weight_scale_2" if case.endswith("modelopt") else "weight_global_scale"
    write(tmp_path / "m", quantize, config, change=change(name, torch.tensor([second])))
    checkpoint = load_model(tmp_path / "m").checkpoint
    for read in (checkpoint.get, checkpoint.stored_type):
        with pytest.raises(
            CheckpointError, match=rf"^tensor {UP}\.{name} is .*; allowed: finite, a"
        ):
            read(f"{UP}.weight")
