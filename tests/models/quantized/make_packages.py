"""Write packages.safetensors: small weights quantized by bitsandbytes, MLX, torchao and others.

`value` tensors are the last rows of the float32 values that the packages return::

    pip install bitsandbytes==0.50.2 mlx[cpu]==0.32.4 compressed-tensors==0.20.1 torchao==0.18.0
    python -m tests.models.quantized.make_packages bitsandbytes mlx compressed-tensors torchao

torchao needs a GPU's package for int4: its class has codes at random, with values by its formula.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

FILE = Path(__file__).with_name("packages.safetensors")
Tensors = dict[str, torch.Tensor]


def weight(rows: int, columns: int) -> torch.Tensor:
    rng = np.random.default_rng(rows + columns)
    return torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32))


def of_bitsandbytes() -> Tensors:
    from bitsandbytes import functional

    found: Tensors = {}
    for kind, is_nested, shape in (
        ("nf4", False, (8, 128)),
        ("nf4", True, (33, 64 * 8)),
        ("fp4", False, (8, 128)),
    ):
        codes, state = functional.quantize_4bit(
            weight(*shape), blocksize=64, quant_type=kind, compress_statistics=is_nested
        )
        prefix = f"bitsandbytes {kind}{' nested' if is_nested else ''}|"
        found[f"{prefix}weight"] = codes
        packed = state.as_dict(packed=True)
        found |= {f"{prefix}weight.{key}": part for key, part in packed.items()}
        found[f"{prefix}value"] = functional.dequantize_4bit(codes, state)[-2:]
    codes, scales, _ = functional.int8_vectorwise_quant(weight(8, 64).half())
    found["bitsandbytes int8|weight"], found["bitsandbytes int8|SCB"] = codes, scales
    found["bitsandbytes int8|value"] = functional.int8_vectorwise_dequant(codes, scales)
    return found


def of_mlx() -> Tensors:
    import mlx.core as mx

    found: Tensors = {}
    for bits in (2, 3, 4, 5, 6, 8):
        parts = mx.quantize(mx.array(weight(4, 128).half().numpy()), group_size=64, bits=bits)
        numbers = [part.astype(mx.float32) for part in parts[1:]]
        value = mx.dequantize(parts[0], *numbers, group_size=64, bits=bits)
        names = "weight", "scales", "biases", "value"
        for name, part in zip(names, (*parts, value), strict=True):
            found[f"MLX int{bits}|{name}"] = torch.from_numpy(np.array(part))
    return found


def of_compressed_tensors() -> Tensors:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    dense = weight(8, 64)
    scheme: QuantizationScheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    second = torch.tensor([448 * 6 / float(dense.abs().max())])
    largest = dense.view(8, 4, 16).abs().amax(-1)
    scale = (largest / 6 * second).to(torch.float8_e4m3fn)
    state = {"weight": dense, "weight_scale": scale.float(), "weight_global_scale": second}
    compressor: Any = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    packed = compressor.compress(state, scheme)
    values = dequantize(
        x_q=unpack_fp4_from_uint8(packed["weight_packed"], *dense.shape).float(),
        scale=packed["weight_scale"].float(),
        args=scheme.weights,
        global_scale=second,
        dtype=torch.float32,
    )
    prefix = "NVFP4 1x16|"
    return {**{f"{prefix}{k}": v for k, v in packed.items()}, f"{prefix}value": values}


def of_torchao() -> Tensors:
    from torch import nn
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int4Tensor,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        dequantize_affine,
        quantize_,
    )

    tensors: Tensors = {}

    def add(name: str, quantized: Any, value: torch.Tensor) -> None:
        stored, entries = flatten_tensor_state_dict({"m.weight": quantized})
        prefix = f"torchao {name}|"
        tensors.update(
            {f"{prefix}{key.removeprefix('m.')}": tensor for key, tensor in stored.items()}
        )
        tensors[f"{prefix}entry"] = torch.tensor([*entries["m.weight"].encode()], dtype=torch.uint8)
        tensors[f"{prefix}value"] = value

    for name, config in (
        ("int8", Int8WeightOnlyConfig()),
        ("float8", Float8WeightOnlyConfig()),
        ("bytes int4", IntxWeightOnlyConfig(torch.int4, PerGroup(32))),
    ):
        linear = nn.Linear(64, 8, bias=False, dtype=torch.bfloat16)
        linear.weight = nn.Parameter(weight(8, 64).bfloat16())
        quantize_(linear, config)
        own: Any = linear.weight.detach()
        if name == "float8":
            add(name, own, own.dequantize(torch.float32))
            continue
        parts = own.qdata, own.block_size, own.scale, own.zero_point, torch.int8
        add(name, own, dequantize_affine(*parts, output_dtype=torch.float32))
    rng = np.random.default_rng(3)
    for name, smallest in (("int4", 0.0), ("int4 minimums", -1.0)):
        codes = torch.from_numpy(rng.integers(-8, 8, (8, 64), np.int8))
        scales, zeros = (
            torch.from_numpy(rng.uniform(low, high, (2, 8))).bfloat16()
            for low, high in ((0.01, 0.1), (smallest, 0))
        )
        pairs = codes[:, ::2] & 0xF | codes[:, 1::2] << 4
        spread = [part.float().T.repeat_interleave(32, 1) for part in (scales, zeros)]
        own = Int4Tensor(pairs, scales, zeros, [1, 32], torch.Size((8, 64)))
        add(name, own, codes.float() * spread[0] + spread[1])
    return tensors


MAKERS = {
    "bitsandbytes": of_bitsandbytes,
    "mlx": of_mlx,
    "compressed-tensors": of_compressed_tensors,
    "torchao": of_torchao,
}


if __name__ == "__main__":
    tensors = load_file(FILE) if FILE.exists() else {}
    for package in sys.argv[1:]:
        tensors |= MAKERS[package]()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, FILE)
