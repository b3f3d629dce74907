"""Values of the packages that make quantized files, bit for bit; refused folders.

packages.safetensors is written by make_packages.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

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
from tests.models.quantized.make_packages import FILE, PACKED
from tests.models.quantized.test_float4 import NV
from tilewright.compiler.formats import get_format, stored_format
from tilewright.errors import CheckpointError
from tilewright.models import load_model, quantised_types
from tilewright.models.checkpoints.quantized.base import RawModel, RawTensor
from tilewright.models.checkpoints.quantized.bitsandbytes import read_bitsandbytes
from tilewright.models.checkpoints.quantized.compressed import read_compressed
from tilewright.models.checkpoints.quantized.methods import take_quantized
from tilewright.models.checkpoints.quantized.mlx import read_mlx
from tilewright.models.checkpoints.quantized.torchao import read_torchao

BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
DTYPES = {
    **{torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"},
    **{torch.int8: "I8", torch.uint32: "U32", torch.float8_e4m3fn: "F8_E4M3"},
    **{torch.int32: "I32", torch.int64: "I64"},
}


def schemes() -> dict[str, Tensors]:
    found: dict[str, Tensors] = {}
    for name, tensor in load_file(FILE).items():
        scheme, _, part = name.partition("|")
        found.setdefault(scheme, {})[part] = tensor
    return found


SCHEMES = schemes()
_OTHER = {"value", "entry", "config"}
"""Parts of a scheme that are no stored tensors."""
HAVE_FORMATS = (
    *("MLX int2", "MLX int3", "MLX int4", "MLX int5", "NVFP4 1x16"),
    *("MLX mxfp4", "MLX mxfp8", "MLX nvfp4"),
    *("bitsandbytes nf4", "bitsandbytes nf4 nested"),
    *("torchao float8", "torchao int8", "torchao bytes int4", "torchao int4"),
    *(f"compressed-tensors {name}" for name in PACKED if name != "W8A8 zeros"),
    *(
        "AWQ",
        "AutoRound int3",
        "AutoRound int4",
        "GPTQ int2",
        "GPTQ int3",
        "GPTQ int4",
        "ModelOpt NVFP4",
    ),
    *("GPTQ v2 int3", "GPTQ v2 int4", "GPTQ sym int4", "ModelOpt FP8"),
    *("ModelOpt FP8 rows", "ModelOpt FP8 blocks", "ModelOpt MXFP8"),
)
LABELS = {
    **{"MLX mxfp4": "MXFP4", "MLX mxfp8": "FP8 1x32, powers of two", "MLX nvfp4": "NVFP4 1x16"},
    "torchao float8": "FP8 per channel",
    "torchao bytes int4": "torchao int4",
    "torchao int4 minimums": "torchao int4 with minimums",
    "AWQ": "AWQ int4 with zeros",
    **{f"GPTQ int{bits}": f"GPTQ int{bits} with zeros" for bits in (2, 3, 4, 8)},
    **{f"AutoRound int{bits}": f"GPTQ int{bits} with zeros" for bits in (3, 4)},
    "GPTQ v2 int3": "GPTQ int3 with zeros",
    "GPTQ v2 int4": "GPTQ int4 with zeros",
    "GPTQ sym int4": "GPTQ int4",
    "GPTQ act-order int4": "GPTQ int4, act-order",
    "ModelOpt NVFP4": "NVFP4 1x16",
    "ModelOpt FP8": "FP8 per tensor",
    "ModelOpt FP8 rows": "FP8 per channel",
    "ModelOpt FP8 blocks": "FP8 128x128",
    "ModelOpt MXFP8": "FP8 1x32, powers of two",
    **{
        f"compressed-tensors {name}": label
        for name, label in {
            "W4A16 zeros": "compressed-tensors int4 with zeros",
            "W4A16": "compressed-tensors int4",
            "W3A16": "compressed-tensors int3",
            "W4A16 act-order": "compressed-tensors int4, act-order",
            "W8A16": "compressed-tensors int8",
            "W8A8": "compressed-tensors int8",
            "W8A8 zeros": "compressed-tensors int8 with zeros",
            "FP8": "FP8 per tensor",
            "FP8 channel": "FP8 per channel",
            "FP8 block": "FP8 128x128",
            "MXFP8": "FP8 1x32, powers of two",
            "MXFP4": "MXFP4",
        }.items()
    },
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_are_the_package_s_bit_for_bit(scheme: str) -> None:
    names = {*SCHEMES[scheme]} - _OTHER
    tensors = {f"m.{name}": SCHEMES[scheme][name] for name in names}
    raw = {n: RawTensor(tuple(t.shape), DTYPES[t.dtype], t.nbytes) for n, t in tensors.items()}

    def read(name: str, where: tuple[slice, ...]) -> torch.Tensor:
        return tensors[name][where].clone()

    model = RawModel(Path("m"), raw, read)
    if "entry" in SCHEMES[scheme]:
        model.metadata = {"m.weight": bytes(SCHEMES[scheme]["entry"].tolist()).decode()}
    if "config" in SCHEMES[scheme]:
        settings = json.loads(bytes(SCHEMES[scheme]["config"].tolist()))
        values = {"model_type": "llama", "quantization_config": settings}
        take_quantized(values, "config.json", model)
    elif scheme.startswith("MLX"):
        bits = int(scheme.removeprefix("MLX int"))
        read_mlx({"bits": bits, "group_size": 64}, "config.json", model)
    elif scheme.startswith("NVFP4"):
        read_compressed(NV, "config.json", model)
    elif scheme.startswith("torchao"):
        read_torchao({}, "config.json", model)
    else:
        read_bitsandbytes(BNB, "config.json", model)
    assert not model.tensors
    weight, expected = model.found["m.weight"], SCHEMES[scheme]["value"]
    rows, first = weight.shape[0], weight.shape[0] - len(expected)
    got = weight.values(read, first, rows)
    if scheme.startswith("ModelOpt"):
        got += 0.0  # its code 8 is 0, not -0
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(weight.values(read, rows - 1, rows), expected[-1:])
    label = weight.stored_type(read)
    assert label == LABELS.get(scheme, scheme.removesuffix(" nested"))
    name = stored_format(label)
    assert (name is not None) == (scheme in HAVE_FORMATS)
    if name == "bf16":
        assert torch.equal(expected.bfloat16().float(), expected)
    elif name is not None:
        data = weight.stored(read, first, rows)[1]
        assert torch.equal(get_format(name).unpack(data.flatten(), expected.shape), expected)


def four_bits(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    own = SCHEMES["bitsandbytes nf4"]
    codes = rng.integers(0, 16, weight.size, np.uint8)
    state = f'{{"quant_type": "nf4", "blocksize": 64, "shape": [{weight.shape[0]}, '
    state += f'{weight.shape[1]}], "dtype": "float32"}}'
    scales = rng.uniform(0.1, 0.2, weight.size // 64).astype(np.float32)
    tensors = {
        "weight": torch.from_numpy(codes[0::2] << 4 | codes[1::2]).view(-1, 1),
        "weight.quant_map": own["weight.quant_map"],
        "weight.absmax": torch.from_numpy(scales),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor([*state.encode()], dtype=torch.uint8),
    }
    values = own["weight.quant_map"].numpy()[codes] * scales.repeat(64)
    return tensors, values.reshape(weight.shape)


def affine(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    rows, columns = weight.shape
    codes = rng.integers(0, 16, weight.shape, np.uint8)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(np.uint32)
    groups = rows, columns // 64
    scales, biases = (
        torch.from_numpy(a * rng.uniform(1, 2, groups)).bfloat16() for a in (0.01, -0.07)
    )
    spread = [part.float().numpy().repeat(64, 1) for part in (scales, biases)]
    tensors = {"weight": torch.from_numpy(packed), "scales": scales, "biases": biases}
    return tensors, codes.astype(np.float32) * spread[0] + spread[1]


MLX = {"group_size": 64, "bits": 4}
CASES: dict[str, tuple[Quantize, dict[str, Any], str]] = {
    "bitsandbytes": (four_bits, BNB, "bitsandbytes nf4"),
    "MLX": (affine, MLX, "MLX int4"),
}


@pytest.mark.parametrize("case", CASES)
def test_folders_have_the_logits_of_dense_values(case: str, tmp_path: Path) -> None:
    quantize, config, label = CASES[case]
    values = write(tmp_path / "m", quantize, config)
    checkpoint = load_model(tmp_path / "m").checkpoint
    assert checkpoint.stored_type(f"{UP}.weight") == label
    assert quantised_types(tmp_path / "m") == (case,)
    write_dense(tmp_path / "dense", values)
    check_logits(tmp_path / "m", tmp_path / "dense")


def test_mlx_modules_inherit_no_mode(tmp_path: Path) -> None:
    values = write(tmp_path / "m", affine, MLX)
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    names = [name for name in values if name.startswith("model.layers.") and "_proj" in name]
    own = {name.removesuffix(".weight"): MLX for name in names}
    config["quantization"] = {"mode": "mxfp4", "group_size": 32, "bits": 4, **own}
    path.write_text(json.dumps(config))
    check_values(tmp_path / "m", values)


NUMBERS = [
    ("torchao int4 minimums", "weight_scale", float("nan")),
    ("torchao int4 minimums", "weight_zero_point", float("inf")),
    ("bitsandbytes nf4 nested", "nested_absmax", 3e38),
]


@pytest.mark.parametrize(("scheme", "suffix", "number"), NUMBERS)
def test_scales_that_are_not_finite_are_refused(scheme: str, suffix: str, number: float) -> None:
    """Also products of nested scales."""
    own = {name: SCHEMES[scheme][name].clone() for name in {*SCHEMES[scheme]} - _OTHER}
    (name,) = (name for name in own if name.endswith(suffix))
    own[name].view(-1)[0] = number
    for other in own:
        if other.endswith("nested_quant_map"):
            own[other].fill_(3e38)
    tensors = {f"m.{each}": own[each] for each in own}
    raw = {n: RawTensor(tuple(t.shape), DTYPES[t.dtype], t.nbytes) for n, t in tensors.items()}
    model = RawModel(Path("m"), raw, lambda name, where: tensors[name][where].clone())
    if "entry" in SCHEMES[scheme]:
        model.metadata = {"m.weight": bytes(SCHEMES[scheme]["entry"].tolist()).decode()}
        read_torchao({}, "config.json", model)
    else:
        read_bitsandbytes(BNB, "config.json", model)
    weight = model.found["m.weight"]
    with pytest.raises(CheckpointError, match="has inf or NaN; allowed: finite values"):
        weight.values(model.read, 0, weight.shape[0])


STATE = "weight.quant_state.bitsandbytes__nf4"
FLOAT4 = {UP: {"mode": "mxfp4", "group_size": 32, "bits": 4}}
REFUSED = [
    ("bitsandbytes", change("weight.absmax", None), {}, r"absmax is missing; allowed: F32 \[384\]"),
    ("bitsandbytes", change(STATE, None), {}, rf"{UP}\.{STATE} is missing; allowed: the state"),
    ("bitsandbytes", change(STATE, torch.zeros(9, dtype=torch.uint8)), {}, "no quantization state"),
    ("bitsandbytes", change(STATE, torch.zeros(5000, dtype=torch.uint8)), {}, "up to 4096 bytes"),
    ("bitsandbytes", change("weight.nested_absmax", torch.ones(2)), {}, "absmax is F32"),
    ("MLX", change("scales", None), {}, rf"{UP}\.scales is missing; allowed: F16 or"),
    ("MLX", change("biases", None), {}, r"up_proj\.biases is missing; allowed: F16"),
    ("MLX", change("x", None), {"bits": 7}, "bits = 7; allowed: 2, 3, 4, 5, 6, 8"),
    ("MLX", change("x", None), {UP: {"bits": 8}}, r"up_proj\.weight is U32"),
    ("MLX", change("x", None), {"mode": "mx"}, "mode = 'mx'; allowed: affine, mxfp4, mxfp8, nv"),
    ("MLX", change("x", None), {"mode": "mxfp4"}, r"size \[4, 64\] in mode mxfp4; .*\[4, 32\]"),
    ("MLX", change("scales", torch.ones(192, 4)), FLOAT4, r"scales is F32 .*; allowed: U8 \["),
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


def eight_bits(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    codes = rng.integers(-127, 128, weight.shape, np.int8)
    scales = rng.uniform(1, 2, len(weight)).astype(np.float32)
    tensors = {"weight": torch.from_numpy(codes), "SCB": torch.from_numpy(scales)}
    return tensors, codes * scales[:, None] * np.float32(1 / 127)


def test_a_codebook_with_a_negative_zero_is_not_the_package_s(tmp_path: Path) -> None:
    codebook = SCHEMES["bitsandbytes nf4"]["weight.quant_map"].clone()
    codebook[7] = -0.0
    write(tmp_path / "m", four_bits, BNB, change=change("weight.quant_map", codebook))
    label = load_model(tmp_path / "m").checkpoint.stored_type(f"{UP}.weight")
    assert label == "bitsandbytes nf4, own codebook"


def test_bytes_without_scales_are_refused(tmp_path: Path) -> None:
    words = rf"{UP}\.SCB is missing; allowed: F32"
    check_refused(tmp_path / "m", eight_bits, BNB, change("SCB", None), words)


@pytest.mark.parametrize("layout", [0, 1, 2, 3])
def test_permuted_codes_are_refused(layout: int, tmp_path: Path) -> None:
    given = change("weight_format", torch.tensor(layout, dtype=torch.uint8))
    if layout:
        words = rf"{UP}\.weight_format has permuted codes; allowed: 0 \(rows\)"
        return check_refused(tmp_path / "m", eight_bits, BNB, given, words)
    write(tmp_path / "m", eight_bits, BNB, change=given)
    assert load_model(tmp_path / "m").checkpoint.stored_type(f"{UP}.weight") == "bitsandbytes int8"


INT8: dict[str, Any] = {
    "_type": "Int8Tensor",
    "_data": {"block_size": [1, 128], "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}},
}


def torchao_bytes(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    codes = rng.integers(-128, 128, weight.shape, np.int8)
    scales = torch.from_numpy(rng.uniform(0.01, 0.02, (len(weight), 1))).bfloat16().float()
    tensors = {"_weight_qdata": torch.from_numpy(codes), "_weight_scale": scales}
    tensors["_weight_zero_point"] = torch.zeros(scales.shape, dtype=torch.int8)
    return tensors, codes * scales.numpy()


def with_entries(folder: Path, **more: Any) -> None:
    """Write the metadata of torchao into the folder's file."""
    path = folder / "model.safetensors"
    tensors, entries = load_file(path), {}
    for name in tensors:
        module, _, last = name.rpartition(".")
        if last == "_weight_qdata":
            sizes = {"block_size": [1, tensors[name].shape[1]]}
            data = {**INT8["_data"], **sizes, **more.get("data", {})}
            entries[f"{module}.weight"] = json.dumps({**INT8, **more, "_data": data})
    save_file(tensors, path, metadata=entries)


TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}


def test_torchao_folders_have_the_logits_of_dense_values(tmp_path: Path) -> None:
    values = write(tmp_path / "m", torchao_bytes, TORCHAO)
    with_entries(tmp_path / "m")
    check_values(tmp_path / "m", values)
    assert load_model(tmp_path / "m").checkpoint.stored_type(f"{UP}.weight") == "torchao int8"
    write_dense(tmp_path / "dense", values)
    check_logits(tmp_path / "m", tmp_path / "dense")


@pytest.mark.parametrize(
    ("damage", "entry", "words"),
    [
        (change("x", None), {"_type": "NVFP4Tensor"}, "class 'NVFP4Tensor'; allowed: Float8Tensor"),
        (change("x", None), {"_type": "Int4Tensor"}, r"_weight_scale is F32 \[128, 1\]; allowed"),
        (change("x", None), {"data": {"block_size": [1, 7]}}, r"block_size \[1, 7\] for shape"),
        (change("_weight_scale", None), {}, r"_weight_scale is missing; allowed: F32"),
        (change("_weight_zero_point", torch.ones(2)), {}, r"_weight_zero_point is F32 \[2\]"),
        (change("_weight_act_pre_scale", torch.ones(2)), {}, "scales activations"),
        (change("x", None), None, "has no entry in the file's metadata; allowed: an object for"),
        (change("_weight_zero_point", torch.full((192, 1), 0.5)), {}, "has a zero that is no code"),
        (
            change("_weight_zero_point", torch.full((192, 1), 20, dtype=torch.int8)),
            {"_type": "IntxUnpackedToInt8Tensor", "data": {"target_dtype": {"_data": "int4"}}},
            "a zero that is no code; allowed: whole numbers from -8 to 7",
        ),
    ],
)
def test_torchao_folders_that_do_not_fit_are_refused(
    damage: Callable[[Tensors], None], entry: dict[str, Any] | None, words: str, tmp_path: Path
) -> None:
    write(tmp_path / "m", torchao_bytes, TORCHAO, change=damage)
    if entry is not None:
        with_entries(tmp_path / "m", **entry)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_model(tmp_path / "m")
    assert "\n" not in str(caught.value)
