"""Write packages.safetensors: small weights quantized by bitsandbytes, MLX, torchao and others.

`value`: the last rows of a package's float32 values. `config`: its own configuration::

    pip install bitsandbytes==0.50.2 mlx[cpu]==0.32.4 compressed-tensors==0.20.1 torchao==0.18.0
    pip install nvidia-modelopt==0.47.0 auto-round==0.16.1
    python -m tests.models.quantized.make_packages bitsandbytes mlx compressed-tensors torchao \\
        awq gptq modelopt

An old version packs columns out of order::

    pip install --no-deps --target old compressed-tensors==0.10.2
    PYTHONPATH=old:. python -m tests.models.quantized.make_packages act-order

The module of gptqmodel runs without the package's imports::

    pip download --no-deps --no-binary :all: gptqmodel==7.7.0
    tar xzf gptqmodel-*.gz && rm gptqmodel-*.gz && mv gptqmodel-* source
    PYTHONPATH=source:. python -m tests.models.quantized.make_packages gptqmodel

torchao needs a GPU's package for int4: its class has codes at random, with values by its formula.
compressed-tensors converts random AWQ codes. auto-round packs GPTQ codes.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

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
    for mode, bits, group in (("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)):
        sizes: dict[str, Any] = {"group_size": group, "bits": bits, "mode": mode}
        parts = mx.quantize(mx.array(weight(4, 128).half().numpy()), **sizes)
        value = mx.dequantize(*parts, **sizes, dtype=mx.float32)
        stored = {
            name: torch.from_numpy(np.array(part)) for name, part in zip(names, parts, strict=False)
        }
        config = {"quant_method": "mlx", **sizes}
        found |= with_config(f"MLX {mode}", stored, torch.from_numpy(np.array(value)), config)
    return found


PACKED: dict[str, tuple[str, dict[str, object]]] = {
    "W4A16 zeros": ("pack-quantized", {"num_bits": 4, "symmetric": False, "group_size": 32}),
    "W4A16": ("pack-quantized", {"num_bits": 4, "group_size": 32}),
    "W3A16": ("pack-quantized", {"num_bits": 3, "group_size": 32, "actorder": "weight"}),
    "W8A16": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "W8A8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "W8A8 zeros": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "FP8": ("float-quantized", {"type": "float", "strategy": "tensor"}),
    "FP8 channel": ("float-quantized", {"type": "float", "strategy": "channel"}),
    "FP8 block": (
        "float-quantized",
        {"type": "float", "strategy": "block", "block_structure": [128, 128]},
    ),
    "MXFP8": (
        "mxfp8-quantized",
        {"type": "float", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
    "MXFP4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
}
"""Formats and weight settings of compressed-tensors."""


def of_compressed_tensors() -> Tensors:
    found = of_nvfp4()
    for name, (form, settings) in PACKED.items():
        found |= of_packed(f"compressed-tensors {name}", form, settings)
    return found


def of_packed(name: str, form: str, settings: Mapping[str, object]) -> Tensors:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    args: Any = QuantizationArgs(**settings)
    dense = weight(16, 128).bfloat16().float()
    width = args.group_size or 128
    groups = dense.view(16, -1, width)
    low, high = groups.amin(-1), groups.amax(-1)
    if args.strategy in ("tensor", "block"):
        low, high = low.amin().view(1, 1), high.amax().view(1, 1)
    scale, zero = calculate_qparams(low, high, args)
    scale = scale.view(1) if args.strategy == "tensor" else scale
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    state = {"weight": dense, "weight_scale": scale.bfloat16().float()}
    state["weight_zero_point"] = zero.to(torch.int8) if args.type == "int" else zero
    compressor: Any = BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(state, scheme)
    value = compressor.decompress(packed, scheme)["weight"].float()
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=form,
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    stored = {
        key: part.bfloat16() if part.dtype == torch.float32 else part
        for key, part in packed.items()
    }
    return with_config(name, stored, value, config.to_dict())


def with_config(name: str, stored: Tensors, value: torch.Tensor, config: Any) -> Tensors:
    found = {f"{name}|{key}": part for key, part in stored.items()}
    text = json.dumps(config, default=str)
    found[f"{name}|config"] = torch.tensor([*text.encode()], dtype=torch.uint8)
    return {**found, f"{name}|value": value[-2:]}


def of_awq() -> Tensors:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    rng = np.random.default_rng(7)
    words = rng.integers(-(1 << 31), 1 << 31, (66, 2), np.int64).astype(np.int32)
    stored = {"qweight": torch.from_numpy(words[:64]), "qzeros": torch.from_numpy(words[64:])}
    stored["scales"] = torch.from_numpy(rng.uniform(0.01, 0.02, (2, 16))).half()
    settings = {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    converter: Any = AutoAWQConverter.from_autoawq_config(settings)
    own = {f"m.{key}": part.clone() for key, part in stored.items()}
    own["m.scales"] = own["m.scales"].float()
    state = {key.removeprefix("m."): part for key, part in converter.process(own).items()}
    (scheme,) = converter.update_config(None).config_groups.values()
    compressor: Any = BaseCompressor.get_value_from_registry("pack-quantized")
    value = compressor.decompress(state, scheme)["weight"]
    return with_config("AWQ", stored, value, {**settings, "quant_method": "awq"})


def of_gptq() -> Tensors:
    """Pack GPTQ codes in the first version, which stores zeros minus 1, and in AutoRound's."""
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    found: Tensors = {}
    for bits in (2, 3, 4, 8):
        found |= packed_gptq("GPTQ", bits, qlinear_torch_zp, {"quant_method": "gptq"})
    own = {"quant_method": "auto-round", "data_type": "int", "act_bits": 16}
    found |= packed_gptq("AutoRound", 3, qlinear_torch, {**own, "packing_format": "auto_round"})
    packing = {"packing_format": "auto_round:auto_gptq"}
    return found | packed_gptq("AutoRound", 4, qlinear_torch_zp, {**own, **packing})


def packed_gptq(package: str, bits: int, module: Any, settings: dict[str, Any]) -> Tensors:
    from torch import nn

    rng = np.random.default_rng(bits)
    codes, zeros = (
        torch.from_numpy(rng.integers(low, 1 << bits, shape)).float()
        for low, shape in ((0, (32, 64)), (1, (32, 2)))
    )
    scales = torch.from_numpy(rng.uniform(0.01, 0.02, (32, 2))).half().float()
    spread = [part.repeat_interleave(32, 1) for part in (zeros, scales)]
    linear = nn.Linear(64, 32, bias=False)
    linear.weight = nn.Parameter((codes - spread[0]) * spread[1], requires_grad=False)
    layer: Any = module.QuantLinear(bits, 32, 64, 32, bias=False)
    layer.device = "cpu"
    layer.pack(linear, scales, zeros, None, device="cpu")
    stored = {key: part.clone() for key, part in layer.state_dict().items()}
    layer.scales = layer.scales.float()
    value = layer(torch.eye(64)).T
    config = {**settings, "bits": bits, "group_size": 32, "sym": False}
    return with_config(f"{package} int{bits}", stored, value, config)


def of_act_order() -> Tensors:
    """Pack columns in the order of activations, which newer versions do not read."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    args: Any = QuantizationArgs(num_bits=4, group_size=32, actorder="group", strategy="group")
    dense, order = weight(16, 128).bfloat16().float(), group_order(128)
    groups = dense[:, order.argsort(stable=True)].view(16, 4, 32)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    scale = scale.bfloat16().float()
    compressor: Any = PackedQuantizationCompressor()
    packed = compressor.compress_weight(dense, scale, args, zero_point=zero.int(), g_idx=order)
    packed |= {"weight_scale": scale, "weight_g_idx": order}
    value = compressor.decompress_weight(packed, args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    status = QuantizationStatus.COMPRESSED
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format="pack-quantized", quantization_status=status
    )
    stored = packed | {"weight_scale": scale.bfloat16()}
    return with_config("compressed-tensors W4A16 act-order", stored, value, config.to_dict())


def group_order(columns: int) -> torch.Tensor:
    """Return each column's group of 32, shuffled."""
    groups = np.arange(columns, dtype=np.int32) // 32
    return torch.from_numpy(np.random.default_rng(columns).permutation(groups))


class _BarePackage(ModuleType):
    """A package without its own imports. An attribute is read from the module that defines it."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            for path in sorted(Path(self.__path__[0]).glob("[!_]*.py")):
                text = path.read_text()
                if any(
                    f"\n{start}" in text
                    for start in (f"def {name}(", f"class {name}(", f"{name} =")
                ):
                    return getattr(importlib.import_module(f"{self.__name__}.{path.stem}"), name)
        raise AttributeError(name)


def import_gptqmodel() -> Any:
    """Import the packing module of gptqmodel, without kernels and models."""
    spec = find_spec("gptqmodel")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    for name in ("", ".models", ".utils", ".nn_modules", ".quantization"):
        package = _BarePackage(f"gptqmodel{name}")
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[package.__name__] = package
    sys.modules.setdefault("pcre", re)
    for name in ("logbar", "threadpoolctl"):
        absent = MagicMock()
        absent.__name__ = name
        sys.modules.setdefault(name, absent)
    return importlib.import_module("gptqmodel.nn_modules.qlinear.torch")


PACKED_GPTQ: dict[str, dict[str, Any]] = {
    "GPTQ v2 int4": {"bits": 4, "sym": False, "format": "gptq_v2"},
    "GPTQ v2 int3": {"bits": 3, "sym": False, "format": "gptq_v2"},
    "GPTQ sym int4": {"bits": 4, "sym": True, "format": "gptq"},
    "GPTQ act-order int4": {"bits": 4, "sym": True, "format": "gptq", "desc_act": True},
}
"""Settings of gptqmodel."""


def of_gptqmodel() -> Tensors:
    """Pack GPTQ codes in both versions. The package packs the second and converts."""
    module = import_gptqmodel()
    dequant = importlib.import_module("gptqmodel.utils.model_dequant")
    config_of = importlib.import_module("gptqmodel.quantization.config").QuantizeConfig
    formats = importlib.import_module("gptqmodel.quantization.config").FORMAT
    from torch import nn

    found: Tensors = {}
    for name, settings in PACKED_GPTQ.items():
        bits, is_symmetric = settings["bits"], settings["sym"]
        rng = np.random.default_rng(bits)
        codes = torch.from_numpy(rng.integers(0, 1 << bits, (32, 64))).float()
        zeros = torch.from_numpy(rng.integers(1, 1 << bits, (32, 2))).float()
        zeros = torch.full_like(zeros, 1 << bits - 1) if is_symmetric else zeros
        scales = torch.from_numpy(rng.uniform(0.01, 0.02, (32, 2))).half().float()
        order = group_order(64) if settings.get("desc_act") else torch.arange(64).int() // 32
        linear = nn.Linear(64, 32, bias=False)
        dense = (codes - zeros[:, order]) * scales[:, order]
        linear.weight = nn.Parameter(dense, requires_grad=False)
        own = {"group_size": 32, "desc_act": False} | settings
        config = config_of(**own | {"format": formats(settings["format"])})
        sizes = {"in_features": 64, "out_features": 32, "bias": False, "register_buffers": True}
        layer: Any = module.TorchLinear(
            **{"bits": bits, "group_size": 32, "desc_act": config.desc_act, "sym": is_symmetric},
            **{**sizes, "pack_dtype": torch.int32, "adapter": None, "format": config.format},
            backend=module.BACKEND.TORCH,
        )
        layer.pack_original(linear, scales, zeros, order)
        stored = {key: part.clone() for key, part in layer.state_dict().items()}
        if settings["format"] == "gptq":
            stored["qzeros"] = dequant._revert_gptq_v1_qzeros_correction(stored["qzeros"], bits)
        layer.scales = layer.scales.float()
        said = {key: each for key, each in config.to_dict().items() if key != "meta"}
        found |= with_config(name, stored, layer.dequantize_weight().T, said)
    return found


def of_modelopt() -> Tensors:
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    dense = weight(8, 64)
    codes, scale, second = NVFP4QTensor.quantize(dense.clone(), 16)
    value = codes.dequantize(torch.float32, scale=scale, double_scale=second, block_sizes={-1: 16})
    stored = {"weight": codes._quantized_data, "weight_scale": scale, "weight_scale_2": second}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    found = with_config("ModelOpt NVFP4", stored, value, config)
    kept, scale = FP8QTensor.quantize(dense.clone())
    value = kept.dequantize(torch.float32, scale=scale)
    stored = {"weight": kept._quantized_data, "weight_scale": scale}
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    found |= with_config("ModelOpt FP8", stored, value, config)
    kept, scale = FP8QTensor.quantize(dense.clone(), axis=0)
    value = kept.dequantize(torch.float32, scale=scale)
    stored = {"weight": kept._quantized_data, "weight_scale": scale.flatten()}
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    found |= with_config("ModelOpt FP8 rows", stored, value, config)
    blocks = {-1: 128, -2: 128}
    kept, scale = FP8QTensor.quantize(weight(130, 144), block_sizes=blocks)
    value = kept.dequantize(torch.float32, scale=scale, block_sizes=blocks)
    stored = {"weight": kept._quantized_data, "weight_scale": scale[:, None, :, None]}
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    found |= with_config("ModelOpt FP8 blocks", stored, value, config)
    kept, scale = MXFP8QTensor.quantize(dense.clone())
    value = kept.dequantize(torch.float32, scale=scale)
    stored = {"weight": kept._quantized_data, "weight_scale": scale}
    config = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
    return found | with_config("ModelOpt MXFP8", stored, value, config)


def of_nvfp4() -> Tensors:
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
    "awq": of_awq,
    "gptq": of_gptq,
    "act-order": of_act_order,
    "gptqmodel": of_gptqmodel,
    "modelopt": of_modelopt,
}


if __name__ == "__main__":
    tensors = load_file(FILE) if FILE.exists() else {}
    for package in sys.argv[1:]:
        tensors |= MAKERS[package]()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, FILE)
