"""Integer weights of AWQ, GPTQ and compressed-tensors: values, blocks, logits, refused folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.models.quantized.folders import (
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
from tilewright.compiler.formats import get_format, stored_format
from tilewright.errors import CheckpointError
from tilewright.models import load_model


def words(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Rows of codes as a stream of bits in int32 words, the lowest bits first, code by code."""
    rows, count = codes.shape
    found = np.zeros((rows, -(-count * bits // 32)), np.uint64)
    for j in range(count):
        word, shift = divmod(j * bits, 32)
        code = codes[:, j].astype(np.uint64)
        found[:, word] |= code << np.uint64(shift) & np.uint64(0xFFFFFFFF)
        if shift + bits > 32:
            found[:, word + 1] |= code >> np.uint64(32 - shift)
    return torch.from_numpy(found.astype(np.uint32).view(np.int32))


def random(
    shape: tuple[int, ...], rng: np.random.Generator, bits: int, group: int, *, is_symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes ``[N, K]``, zeros and scales ``[N, K / group]``."""
    rows, columns = shape
    codes = rng.integers(0, 1 << bits, shape)
    codes[0, :2] = 0, (1 << bits) - 1
    zeros = rng.integers(0, 1 << bits, (rows, columns // group))
    zeros[0, 0] = 0
    if is_symmetric:
        zeros[:] = 1 << (bits - 1)
    scales = rng.uniform(1e-3, 2e-2, zeros.shape) * rng.choice([-1, 1], zeros.shape)
    return codes, zeros, scales


def formula(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray
) -> np.ndarray:
    values = (codes - zeros[:, groups]).astype(np.float64) * scales.astype(np.float64)[:, groups]
    return values.astype(np.float32)


def awq(group: int = 64) -> Quantize:
    def run(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        columns = weight.shape[1]
        codes, zeros, scales = random(weight.shape, rng, 4, group, is_symmetric=False)
        scales = scales.astype(np.float16)
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # the column in each nibble of a word

        def packed(values: np.ndarray) -> torch.Tensor:
            return words(
                values.reshape(len(values), -1, 8)[:, :, order].reshape(len(values), -1), 4
            )

        stored = {"qweight": packed(codes.T), "qzeros": packed(zeros.T)}
        stored["scales"] = torch.from_numpy(scales.T.copy())
        return stored, formula(codes, zeros, scales, np.arange(columns) // group)

    return run


def gptq(
    bits: int,
    group: int = 64,
    *,
    is_symmetric: bool = True,
    version: int = 1,
    ordered: bool = False,
) -> Quantize:
    def run(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        columns = weight.shape[1]
        own = columns if group == -1 else group
        codes, zeros, scales = random(weight.shape, rng, bits, own, is_symmetric=is_symmetric)
        scales = scales.astype(np.float16)
        groups = np.arange(columns) // own
        if ordered:
            rng.shuffle(groups)
        written = (zeros - 1) % (1 << bits) if version == 1 else zeros
        stored = {
            "qweight": words(codes, bits).T,
            "qzeros": words(written.T, bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return stored, formula(codes, zeros, scales, groups)

    return run


def packed(
    bits: int,
    group: int | None = 64,
    *,
    is_symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    ordered: bool = False,
) -> Quantize:
    def run(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        columns = weight.shape[1]
        own = group or columns
        codes, zeros, scales = random(weight.shape, rng, bits, own, is_symmetric=is_symmetric)
        rounded = torch.from_numpy(scales).to(dtype)
        groups = np.arange(columns) // own
        if ordered:
            rng.shuffle(groups)
        stored = {
            "weight_packed": words(codes, bits),
            "weight_shape": torch.tensor(weight.shape),
            "weight_scale": rounded,
        }
        if not is_symmetric:
            stored["weight_zero_point"] = words(zeros.T, bits).T
        if ordered:
            stored["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return stored, formula(codes, zeros, rounded.double().numpy(), groups)

    return run


def int8(*, is_symmetric: bool = True, whole: bool = False) -> Quantize:
    def run(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        columns = weight.shape[1]
        codes, zeros, scales = random(weight.shape, rng, 8, columns, is_symmetric=is_symmetric)
        codes, zeros = codes - 128, zeros - 128
        rounded = torch.from_numpy(scales).bfloat16()
        if whole:
            zeros, rounded = zeros[:1].repeat(len(codes), 0), rounded[:1, 0]
        stored = {"weight": torch.from_numpy(codes.astype(np.int8)), "weight_scale": rounded}
        if not is_symmetric:
            stored["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
        spread = np.broadcast_to(rounded.double().numpy().reshape(-1, 1), zeros.shape)
        return stored, formula(codes, zeros, spread, np.zeros(columns, int))

    return run


def of_awq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", **more}


def of_gptq(bits: int, **more: Any) -> dict[str, Any]:
    base = {"quant_method": "gptq", "bits": bits, "group_size": 64, "sym": True, "desc_act": False}
    return {**base, **more}


def of_compressed(
    bits: int, form: str = "pack-quantized", group_size: int | None = 64, **more: Any
) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "group_size": group_size}
    group = {"targets": ["Linear"], "weights": weights}
    return {
        **{"quant_method": "compressed-tensors", "format": form},
        **{"quantization_status": "compressed", "config_groups": {"group_0": group}, **more},
    }


def ordered_by(order: object) -> dict[str, Any]:
    """Settings with an order of the groups."""
    weights = {**of_compressed(4)["config_groups"]["group_0"]["weights"], "actorder": order}
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}


V2 = {"checkpoint_format": "gptq_v2"}


def of_auto_round(packing: str, **more: Any) -> dict[str, Any]:
    base = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "data_type": "int"}
    return {**base, "packing_format": packing, **more}


DENSE = {"extra_config": {"lm_head": {"bits": 16, "data_type": "fp"}}}
CASES: dict[str, tuple[Quantize, dict[str, Any], str]] = {
    "awq": (awq(), of_awq(), "AWQ int4 with zeros"),
    "auto-round awq": (awq(), of_auto_round("auto_round:auto_awq"), "AWQ int4 with zeros"),
    "auto-round gptq": (gptq(4), of_auto_round("auto_round:auto_gptq", **DENSE), "GPTQ int4"),
    "auto-round": (
        gptq(4, is_symmetric=False, version=2),
        of_auto_round("auto_round", sym=False),
        "GPTQ int4 with zeros",
    ),
    "gptq 4": (gptq(4), of_gptq(4), "GPTQ int4"),
    "gptq 4 v2": (gptq(4, version=2), of_gptq(4, **V2), "GPTQ int4"),
    "gptq 4 zeros": (
        gptq(4, is_symmetric=False),
        of_gptq(4, sym=False),
        "GPTQ int4 with zeros",
    ),
    "gptq 2 zeros": (
        gptq(2, is_symmetric=False),
        of_gptq(2, sym=False),
        "GPTQ int2 with zeros",
    ),
    "gptq 3 zeros v2": (
        gptq(3, is_symmetric=False, version=2),
        of_gptq(3, sym=False, **V2),
        "GPTQ int3 with zeros",
    ),
    "gptq 8": (gptq(8, -1), of_gptq(8, group_size=-1), "GPTQ int8"),
    "gptq act-order": (
        gptq(4, ordered=True),
        of_gptq(4, desc_act=True),
        "GPTQ int4, act-order",
    ),
    "gptq 16": (gptq(4, 16), of_gptq(4, group_size=16), "GPTQ int4, groups of 16"),
    "packed 4": (packed(4), of_compressed(4), "compressed-tensors int4"),
    "packed 4 zeros": (
        packed(4, is_symmetric=False, dtype=torch.float16),
        of_compressed(4),
        "compressed-tensors int4 with zeros",
    ),
    "packed 4 wide": (
        packed(4, dtype=torch.float32),
        of_compressed(4),
        "compressed-tensors int4, wide scales",
    ),
    "packed 8 channel": (
        packed(8, None),
        of_compressed(8, group_size=-1),
        "compressed-tensors int8",
    ),
    "packed 3": (packed(3), of_compressed(3), "compressed-tensors int3"),
    "packed 4 static": (
        packed(4),
        {**of_compressed(4), **ordered_by("static")},
        "compressed-tensors int4",
    ),
    "packed 4 act-order": (
        packed(4, ordered=True),
        of_compressed(4),
        "compressed-tensors int4, act-order",
    ),
    "int8": (int8(), of_compressed(8, "int-quantized", None), "compressed-tensors int8"),
    "int8 tensor": (
        int8(whole=True),
        of_compressed(8, "int-quantized", None),
        "compressed-tensors int8",
    ),
    "int8 zeros": (
        int8(is_symmetric=False),
        of_compressed(8, "naive-quantized", None),
        "compressed-tensors int8 with zeros",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_the_formulas_bit_for_bit(case: str, tmp_path: Path) -> None:
    """Those of blocks too, where a format holds them, as the gguf package reads them."""
    quantize, config, label = CASES[case]
    values = write(tmp_path / "m", quantize, config)
    check_values(tmp_path / "m", values)
    checkpoint: Any = load_model(tmp_path / "m").checkpoint
    assert checkpoint.stored_type(f"{UP}.weight") == label
    held = stored_format(label)
    assert (held is None) == ("," in label or label.endswith("int8 with zeros"))
    for name in (f"{UP}.weight", "model.layers.0.self_attn.k_proj.weight") if held else ():
        kind, blocks = checkpoint.stored(name)
        assert blocks.shape[1] == get_format(str(held)).nbytes((1, values[name].shape[1]))
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
        assert np.array_equal(expected.view(np.uint32), values[name].view(np.uint32))
        assert np.array_equal(checkpoint.stored(name, slice(9, 21))[1], blocks[9:21])


@pytest.mark.parametrize(
    "case", ["awq", "gptq 4", "gptq act-order", "packed 3", "packed 8 channel"]
)
def test_logits_are_those_of_dense_values(case: str, tmp_path: Path) -> None:
    quantize, config, _ = CASES[case]
    write_dense(tmp_path / "dense", write(tmp_path / "m", quantize, config))
    check_logits(tmp_path / "m", tmp_path / "dense")


def same(tensors: Tensors) -> None:
    """Change nothing."""


def empty(tensors: Tensors) -> None:
    """Remove all inputs of the first module."""
    tensors["model.layers.0.mlp.down_proj.qweight"] = torch.zeros(0, 16, dtype=torch.int32)


INTS = torch.int32
MODULE = {"extra_config": {UP: {"bits": 8}}}
REFUSED = [
    ("auto-round", same, {"packing_format": "auto_round:mlx"}, "'auto_round:mlx'; allowed: auto"),
    ("auto-round", same, {"packing_format": None}, "packing_format = None; allowed: auto_round,"),
    ("auto-round", same, {"data_type": "nv_fp"}, "data_type = 'nv_fp'; allowed: int"),
    ("auto-round", same, {"bits": 5}, "bits = 5; allowed: 2, 3, 4, 8"),
    ("auto-round", same, MODULE, rf"extra_config.{UP}.bits = 8; allowed: 4, as all modules"),
    ("auto-round", change("qzeros", None), {}, "qzeros is missing; allowed: I32"),
    ("awq", change("scales", None), {}, r"up_proj\.scales is missing; allowed: F16 \[2, 192\]"),
    ("awq", change("qzeros", torch.zeros(1, 24, dtype=INTS)), {}, r"I32 \[1, 24\]; .*\[2, 24\]"),
    ("awq", same, {"version": "gemv"}, "version = 'gemv'; allowed: gemm"),
    ("awq", same, {"bits": 3}, "bits = 3; allowed: 4"),
    ("awq", same, {"zero_point": False}, "zero_point = False; allowed: True"),
    ("awq", same, {"group_size": 80}, r"qweight has \d+ inputs; allowed: a multiple of 80"),
    ("awq", same, {"group_size": "64"}, "group_size = '64'; allowed: -1"),
    ("gptq act-order", change("g_idx", None), {}, r"g_idx is missing; allowed: I32"),
    ("gptq 4", change("scales", torch.zeros(2, 192)), {}, r"scales is F32 .*allowed: F16"),
    ("gptq 4", same, {"bits": 5}, "bits = 5; allowed: 2, 3, 4, 8"),
    ("gptq 4", same, {"dynamic": {"-:.*": {}}}, "dynamic is not read"),
    ("gptq 4", same, {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'; allowed"),
    ("packed 4", change("weight_scale", None), {}, r"weight_scale is missing; allowed: F32"),
    ("packed 4", change("weight_shape", torch.tensor([192, 64])), {}, r"words of 4 bits"),
    ("packed 4", same, {"format": "marlin-24"}, "format = 'marlin-24'; allowed: float-qu"),
    ("packed 4", same, {"quantization_status": "frozen"}, "status = 'frozen'; allowed: compressed"),
    ("packed 4", same, {"transform_config": {"a": 1}}, "transform_config is not read"),
    (
        "packed 4 act-order",
        change("weight_g_idx", None),
        {},
        rf"{UP}\.weight_g_idx is missing; .*none",
    ),
    ("packed 4", same, ordered_by("group"), r"weight_g_idx is missing; allowed: the tensor, which"),
    ("packed 4", same, ordered_by("Dynamic"), r"weight_g_idx is missing; allowed: the tensor, wh"),
    ("packed 4", same, ordered_by(True), r"weight_g_idx is missing; allowed: the tensor, which"),
    ("packed 4", same, ordered_by("first"), r"actorder = 'first'; allowed: group, weight"),
    ("packed 4", same, ordered_by(1), r"actorder = '1'; allowed: group, weight"),
    ("packed 4", same, {"config_groups": {"g": {}}}, r"num_bits = None; allowed: 1 to 8"),
    ("awq", change("qweight", torch.zeros(0, 24, dtype=INTS)), {}, r"shape \[0, 24\]; .*1 and"),
    ("awq", empty, {"group_size": -1}, "axes of 1 and above"),
    ("gptq 4", empty, {"group_size": -1}, r"shape \[0, 16\]; allowed: words of 4 bits"),
    ("int8", change("weight", torch.zeros(0, 128, dtype=torch.int8)), {}, r"weight_scale is|1 and"),
    ("int8", change("weight_scale", torch.ones(7)), {}, r"is F32 \[7\]; allowed: .*\[192, 1\]"),
]


@pytest.mark.parametrize(("case", "damage", "config", "words"), REFUSED)
def test_folders_that_do_not_fit_are_refused(
    case: str,
    damage: Callable[[Tensors], None],
    config: dict[str, Any],
    words: str,
    tmp_path: Path,
) -> None:
    quantize, own, _ = CASES[case]
    check_refused(tmp_path / "m", quantize, {**own, **config}, damage, words)


@pytest.mark.parametrize(
    ("case", "damage", "words"),
    [
        (
            "gptq 4",
            change("g_idx", torch.full((128,), 2, dtype=INTS)),
            "g_idx has a group outside 0 to 1",
        ),
        (
            "gptq 4",
            change("qzeros", torch.zeros(2, 24, dtype=INTS)),
            "qzeros: sym = true but zeros differ",
        ),
        (
            "awq",
            change("scales", torch.full((2, 192), torch.nan).half()),
            "scales has a scale that is inf",
        ),
    ],
)
def test_values_that_contradict_the_file_are_refused_by_name(
    case: str, damage: Callable[[Tensors], None], words: str, tmp_path: Path
) -> None:
    quantize, config, _ = CASES[case]
    write(tmp_path / "m", quantize, config, change=damage)
    with pytest.raises(CheckpointError, match=rf"^tensor {UP}\.{words}"):
        load_model(tmp_path / "m").checkpoint.get(f"{UP}.weight")
