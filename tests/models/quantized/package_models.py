"""Whole models of the packages' tensors: a small matrix, its rows repeated, in every layer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.models.conftest import tiny_hf_config
from tests.models.quantized.folders import Tensors
from tests.models.quantized.test_float4 import NV
from tests.models.quantized.test_packages import BNB, SCHEMES, TORCHAO

_SHARED = (
    *(
        "g_idx",
        "weight_g_idx",
        "weight_global_scale",
        "weight_scale_2",
        "input_scale",
        "weight_shape",
    ),
    *("weight.quant_map", "weight.nested_quant_map"),
)
"""Tensors of a matrix that do not have its rows."""
_STATE = "weight.quant_state"
_MERGED = ("MLX", "bitsandbytes", "torchao", "compressed-tensors")
"""Packages whose configuration allows several schemes."""
_SINGLE = ("bitsandbytes int8", "bitsandbytes nf4 nested")
_MODULES = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def together() -> dict[str, tuple[str, ...]]:
    """Return the schemes of each model. A configuration with several schemes has all of them."""
    found: dict[str, list[str]] = {}
    for scheme in SCHEMES:
        package = scheme.partition(" ")[0]
        is_merged = package in _MERGED and scheme not in _SINGLE
        found.setdefault(package if is_merged else scheme, []).append(scheme)
    return {name: tuple(sorted(schemes)) for name, schemes in sorted(found.items())}


def write_model(folder: Path, schemes: Sequence[str]) -> None:
    """Write a Llama whose linear layers have these schemes in turn, with a tokenizer."""
    folder.mkdir(parents=True)
    size = SCHEMES[schemes[0]]["value"].shape[1]
    torch.manual_seed(4)
    config = tiny_hf_config(
        hidden_size=size,
        intermediate_size=size,
        head_dim=size // 4,
        num_hidden_layers=math.ceil(len(schemes) / len(_MODULES)),
        tie_word_embeddings=False,
        vocab_size=258,
        initializer_range=0.2,
    )
    names = [
        f"model.layers.{at}.{each}" for at in range(config.num_hidden_layers) for each in _MODULES
    ]
    modules = {name: schemes[at % len(schemes)] for at, name in enumerate(names)}
    tensors: Tensors = {}
    for name, weight in transformers.LlamaForCausalLM(config).named_parameters():
        module = name.removesuffix(".weight")
        if module not in modules:
            tensors[name] = weight.detach()
            continue
        stored = with_rows(modules[module], weight.shape[0])
        tensors |= {f"{module}.{key}": part.clone() for key, part in stored.items()}
    entries = {f"{module}.weight": _entry(scheme) for module, scheme in modules.items()}
    is_torchao = schemes[0].startswith("torchao")
    save_file(tensors, folder / "model.safetensors", metadata=entries if is_torchao else None)
    said = {**config.to_dict(), **_settings(modules)}
    (folder / "config.json").write_text(json.dumps(said, default=str))
    write_tokenizer(folder)


def with_rows(scheme: str, rows: int) -> Tensors:
    """Return a scheme's tensors for a matrix of ``rows``: those of the package, repeated."""
    own = SCHEMES[scheme]
    columns, stored = own["value"].shape[1], {}
    count = _num_rows(scheme)
    for name, tensor in own.items():
        if name in ("value", "entry", "config"):
            continue
        if name == "weight_shape":
            stored[name] = torch.tensor([rows, columns])
        elif name.startswith(_STATE):
            state = json.loads(bytes(tensor.tolist())) | {"shape": [rows, columns]}
            stored[name] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
        elif name == "weight.nested_absmax":
            stored[name] = tensor[:1].repeat(-(-rows * columns // 64 // 256))
        elif name in _SHARED or tensor.numel() == 1:
            stored[name] = tensor
        else:
            stored[name] = _repeated(tensor, _row_axis(scheme, name), count, rows)
    return stored


def _num_rows(scheme: str) -> int:
    own = SCHEMES[scheme]
    columns = own["value"].shape[1]
    if "weight_shape" in own:
        return int(own["weight_shape"][0])
    if "qweight" in own:
        return own["scales"].shape[1]
    if any(name.startswith(_STATE) for name in own):
        return 2 * own["weight"].numel() // columns
    name = next(name for name in ("weight", "weight_packed", "_weight_qdata") if name in own)
    return own[name].shape[0]


def _row_axis(scheme: str, name: str) -> int:
    is_transposed = scheme.startswith(("AWQ", "AutoRound", "GPTQ")) or (
        scheme.startswith("torchao int4") and name != "_weight_qdata"
    )
    return 1 if is_transposed else 0


def _repeated(tensor: torch.Tensor, axis: int, count: int, rows: int) -> torch.Tensor:
    """Repeat an axis that stands for ``count`` rows up to ``rows``."""
    size = tensor.shape[axis] * rows // count
    raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    index = torch.arange(size) % tensor.shape[axis]
    return raw.index_select(axis, index).view(tensor.dtype)


def _entry(scheme: str) -> str:
    own = SCHEMES[scheme].get("entry")
    return "" if own is None else bytes(own.tolist()).decode()


def _settings(modules: dict[str, str]) -> dict[str, Any]:
    """Return the configuration's key of quantization and its value."""
    schemes = [*modules.values()]
    if schemes[0].startswith("MLX"):
        own = {module: _mlx_settings(scheme) for module, scheme in modules.items()}
        return {"quantization": {"group_size": 64, "bits": 4, **own}}
    if schemes[0].startswith("torchao"):
        return {"quantization_config": TORCHAO}
    if schemes[0].startswith("bitsandbytes"):
        return {"quantization_config": BNB}
    if schemes[0].startswith("NVFP4"):
        return {"quantization_config": NV}
    configs = [json.loads(bytes(SCHEMES[scheme]["config"].tolist())) for scheme in schemes]
    if len(set(schemes)) == 1:
        return {"quantization_config": configs[0]}
    groups = {
        module: {**config["config_groups"]["group_0"], "targets": [f"re:^{module}$"]}
        for module, config in zip(modules, configs, strict=True)
    }
    mixed = {"format": "mixed-precision", "config_groups": groups, "ignore": ["lm_head"]}
    return {"quantization_config": {**configs[0], **mixed}}


def _mlx_settings(scheme: str) -> dict[str, Any]:
    if "config" not in SCHEMES[scheme]:
        return {"group_size": 64, "bits": int(scheme.removeprefix("MLX int"))}
    settings: dict[str, Any] = json.loads(bytes(SCHEMES[scheme]["config"].tolist()))
    return settings


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer of 258 tokens."""
    alphabet = ["<|start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
