"""Write packages.safetensors: small weights quantized by bitsandbytes, MLX and compressed-tensors.

`value` tensors are the last rows of the float32 values that the packages return::

    pip install bitsandbytes==0.50.2 mlx[cpu]==0.32.4 compressed-tensors==0.20.1
    python -m tests.models.quantized.make_packages bitsandbytes mlx compressed-tensors
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


MAKERS = {
    "bitsandbytes": of_bitsandbytes,
    "mlx": of_mlx,
    "compressed-tensors": of_compressed_tensors,
}


if __name__ == "__main__":
    tensors = load_file(FILE) if FILE.exists() else {}
    for package in sys.argv[1:]:
        tensors |= MAKERS[package]()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, FILE)
