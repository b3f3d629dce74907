"""Mutated headers and configurations: every reader answers with values or an error in a line.

See `tests.fuzz.campaign` for the number of mutations in the slow campaign.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fuzz.campaign import run_many
from tests.models.quantized.folders import Quantize, Tensors
from tests.models.quantized.test_float4 import COMPRESSED, MODELOPT, MX, NV
from tests.models.quantized.test_float4 import quantizer as float4
from tests.models.quantized.test_float8 import BF16, BLOCKS, GRIDS, TENSOR, quantizer
from tests.models.quantized.test_integers import (
    awq,
    gptq,
    int8,
    of_auto_round,
    of_awq,
    of_compressed,
    of_gptq,
    packed,
)
from tests.models.quantized.test_packages import (
    BNB,
    DTYPES,
    INT8,
    MLX,
    SCHEMES,
    TORCHAO,
    affine,
    eight_bits,
    four_bits,
    torchao_bytes,
)
from tilewright.compiler.formats import STORED_NAMES, get_format, stored_format
from tilewright.errors import TilewrightError
from tilewright.models.checkpoints.quantized.base import RawModel, RawTensor
from tilewright.models.checkpoints.quantized.methods import take_quantized

SHAPE = 64, 128
MODULES = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
NAMES = {**DTYPES, torch.int32: "I32", torch.int64: "I64", torch.float8_e5m2: "F8_E5M2"}
SETTINGS: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        3,
        4,
        7,
        8,
        16,
        32,
        64,
        128,
        1 << 40,
        0.5,
        float("nan"),
        "",
        "x",
    ),
    *("re:.*", "re:(", "re:(a+)+$", "*", "lm_head", "model.layers.0", [], {}, [1], [64, 64], ["x"]),
    *([[["up_proj"]]], {"g": {}}, [None], "torch.int4", "channel", "group", "block", "gptq_v2"),
)
NUMBERS = (0, -1, 1, 255, float("nan"), float("inf"), -0.0, 1e-45, 3e38)


def experts(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    codes = torch.from_numpy(rng.integers(0, 256, (2, 4, 3, 16), np.uint8))
    stored = {"_blocks": codes, "_scales": torch.full((2, 4, 3), 120, dtype=torch.uint8)}
    return stored, weight


def from_package(scheme: str) -> Quantize:
    def run(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        own = SCHEMES[scheme]
        return {name: own[name] for name in own if name not in ("value", "entry", "config")}, weight

    return run


def mlx_mode(mode: str, bits: int, group: int) -> dict[str, Any]:
    return {"quant_method": "mlx", "group_size": group, "bits": bits, "mode": mode}


CASES: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "fp8 blocks": (quantizer((48, 80)), {**BLOCKS, "weight_block_size": [48, 80]}),
    "fp8 tensor": (quantizer(), TENSOR),
    "compressed blocks": (quantizer((64, 32), **BF16), GRIDS),
    "compressed packed": (packed(4, is_symmetric=False, ordered=True), of_compressed(4)),
    "compressed bytes": (int8(is_symmetric=False), of_compressed(8, "int-quantized", None)),
    "compressed nvfp4": (float4(COMPRESSED, divides=True), NV),
    "compressed mxfp4": (float4((*COMPRESSED[:2], None)), MX),
    "auto-round": (gptq(4), of_auto_round("auto_round:auto_gptq")),
    "awq": (awq(), of_awq()),
    "gptq": (gptq(4, ordered=True), of_gptq(4, desc_act=True)),
    "gptq 3 bits": (gptq(3, is_symmetric=False), of_gptq(3, sym=False)),
    "modelopt": (float4(("weight", "weight_scale", "weight_scale_2")), MODELOPT),
    "mxfp4 experts": (experts, {"quant_method": "mxfp4"}),
    "nf4": (four_bits, BNB),
    "nf4 nested": (from_package("bitsandbytes nf4 nested"), BNB),
    "bitsandbytes int8": (eight_bits, BNB),
    "mlx": (affine, {**MLX, "quant_method": "mlx"}),
    **{
        f"mlx {mode}": (from_package(f"MLX {mode}"), mlx_mode(mode, bits, group))
        for mode, bits, group in (("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16))
    },
    "torchao": (torchao_bytes, TORCHAO),
    **{
        name: (from_package(name), TORCHAO)
        for name in SCHEMES
        if name.startswith("torchao") and name != "torchao int8"
    },
}


def entry_of(name: str) -> str:
    """The metadata for a weight of torchao."""
    own = SCHEMES.get(name, {}).get("entry")
    return json.dumps(INT8) if own is None else bytes(own.tolist()).decode()


def made(name: str) -> tuple[dict[str, Any], Tensors, dict[str, str]]:
    """A valid configuration, tensors and metadata. A mutation replaces values and tensors whole."""
    return dict(CASES[name][1]), dict(stored_by(name)), entries_of(name)


@cache
def stored_by(name: str) -> Tensors:
    quantize, _ = CASES[name]
    tensors: Tensors = {"model.norm.weight": torch.ones(4), "lm_head.weight": torch.ones(8, 4)}
    for seed, module in enumerate(MODULES):
        stored, _ = quantize(np.ones(SHAPE, np.float32), np.random.default_rng(seed))
        middle = "" if name == "mxfp4 experts" else "."
        tensors |= {f"{module}{middle}{key}": tensor for key, tensor in stored.items()}
    return tensors


def entries_of(name: str) -> dict[str, str]:
    return {f"{module}.weight": entry_of(name) for module in MODULES}


def mutated_value(value: Any, rng: random.Random) -> Any:
    """A changed JSON value: another setting, or a change inside."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice([*value])
        result = dict(value)
        if rng.random() < 0.2:
            del result[key]
        else:
            result[key] = mutated_value(value[key], rng)
        return result
    if isinstance(value, list) and value and rng.random() < 0.7:
        items = list(value)
        items[rng.randrange(len(value))] = copy.deepcopy(rng.choice(SETTINGS))
        return items
    return copy.deepcopy(rng.choice(SETTINGS))  # a later mutation changes it


LISTS = (
    *("ignore", "modules_to_not_convert", "modules_to_convert", "exclude_modules"),
    *("quantized_layers", "llm_int8_skip_modules", "modules_in_block_to_quantize", MODULES[0]),
)


def mutate_tensor(tensors: Tensors, rng: random.Random) -> None:
    name = rng.choice([*tensors])
    tensor, choice = tensors[name], rng.randrange(8)
    if choice == 0:
        del tensors[name]
    elif choice == 1:
        tensors[rng.choice([name + "x", MODULES[0] + ".weight", MODULES[1] + ".g_idx"])] = tensor
    elif choice == 2:
        tensors[name] = (
            tensor.to(rng.choice([*NAMES])) if tensor.dtype.itemsize > 1 else tensor.reshape(-1)[:1]
        )
    elif choice == 3 and tensor.ndim:
        tensors[name] = tensor[: rng.randrange(len(tensor) + 1)].clone()
    elif choice == 4:
        tensors[name] = tensor.reshape(rng.choice([(-1,), (1, -1), (-1, 1), (1, 1, -1)]))
    elif choice == 5 and tensor.ndim:
        bytes_ = tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        tensors[name] = torch.cat([bytes_] * 2).view(tensor.dtype)
    elif choice == 6 and tensor.numel() and tensor.is_floating_point():
        numbers = tensor.clone().contiguous()
        index = rng.randrange(tensor.numel())
        numbers.view(-1)[index] = torch.tensor(rng.choice(NUMBERS)).to(tensor.dtype)
        tensors[name] = numbers
    elif tensor.numel():
        bytes_ = tensor.clone().contiguous().reshape(-1).view(torch.uint8)
        for _ in range(rng.randrange(1, 9)):
            bytes_[rng.randrange(len(bytes_))] = rng.choice(
                (0, 1, 127, 128, 255, rng.randrange(256))
            )
        tensors[name] = bytes_.view(tensor.dtype).reshape(tensor.shape)


def run(name: str, seed: int) -> bool:
    """Read a mutated folder whole. Return whether it was refused."""
    rng = random.Random(seed)
    config, tensors, entries = made(name)
    for _ in range(rng.randrange(1, 4)):
        if rng.random() < 0.4:
            config = mutated_value(config, rng)
            config = config if isinstance(config, dict) else {}
            config.setdefault("quant_method", CASES[name][1]["quant_method"])
        elif rng.random() < 0.2:
            config[rng.choice(LISTS)] = mutated_value([MODULES[0]], rng)
        elif name.startswith("torchao") and rng.random() < 0.4:
            key = rng.choice([*entries])
            entry = mutated_value(json.loads(entry_of(name)), rng)
            entries[key] = rng.choice((json.dumps(entry), "", "[[", "3"))
        elif tensors:
            mutate_tensor(tensors, rng)
    values = {"model_type": "llama", "quantization_config": config}
    text = ""
    try:
        read_whole(values, tensors, entries)
    except TilewrightError as error:
        text = str(error)
    assert "\n" not in text and len(text) < 1500
    return bool(text)


def read_whole(values: Mapping[str, Any], tensors: Tensors, entries: Mapping[str, str]) -> None:
    raw = {n: RawTensor(tuple(t.shape), NAMES[t.dtype], t.nbytes) for n, t in tensors.items()}

    def read(name: str, where: tuple[slice, ...]) -> torch.Tensor:
        return tensors[name][where].clone(memory_format=torch.contiguous_format)

    model = RawModel(Path("m"), raw, read, metadata=entries)
    take_quantized(values, "m/config.json", model)
    for weight in model.found.values():
        label = weight.stored_type(read)
        assert label
        whole = weight.slices(read, tuple(slice(None) for _ in weight.shape))
        assert whole.shape == weight.shape
        held = stored_format(label)
        if held is not None and get_format(held).block > 1:
            stored, data = weight.stored(read, 0, weight.shape[0])
            assert stored == STORED_NAMES[held]
            unpacked = get_format(held).unpack(data.flatten(), weight.shape)
            assert torch.equal(unpacked.view(torch.int32), whole.view(torch.int32))


@pytest.mark.parametrize("name", CASES)
def test_mutated_folders_are_read_or_refused_in_a_line(name: str) -> None:
    config, tensors, entries = made(name)
    values = {"model_type": "llama", "quantization_config": config}
    read_whole(values, tensors, entries)
    refused = sum(run(name, seed) for seed in range(30))
    assert 5 <= refused < 30


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_many_mutated_folders_are_read_or_refused_in_a_line(name: str) -> None:
    run_many(lambda seed: run(name, seed), name, len(CASES))
