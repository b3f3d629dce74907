"""``python -m bench random-files``: a folder with a quantized shape and random codes.

Other servers read the same folder, so a comparison has equal files. The text is noise. A tokenizer
is not written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tilewright.errors import CheckpointError, ConfigError, allowed
from tilewright.models import load_model
from tilewright.models.shapes import SHAPES
from tilewright.options.arguments import option, parse

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
_ROUTER = ".mlp.gate"
_DENSE = (".embed_tokens", ".lm_head", _ROUTER, ".mlp.router")
"""Ends of dense modules' names."""
_RANDOM_BYTES = 1 << 26
_BLOCK, _GROUP = 128, 128


class RandomCodes:
    """Repeated random bytes: only speed matters."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(-(1 << 63), (1 << 63) - 1, (_RANDOM_BYTES // 8,), generator=generator)
        self._bytes = words.view(torch.uint8)

    def get(self, shape: tuple[int, ...]) -> Tensor:
        """Return uint8 codes."""
        count = torch.Size(shape).numel()
        copies = -(-count // len(self._bytes))
        return self._bytes[:count].repeat(copies)[:count].view(shape)


def _fp8(codes: RandomCodes, rows: int, columns: int) -> dict[str, Tensor]:
    values = (codes.get((rows, columns)) & 0xBF).view(torch.float8_e4m3fn)  # below 2, no NaN
    scales = torch.full((-(-rows // _BLOCK), -(-columns // _BLOCK)), 0.03)
    return {"weight": values, "weight_scale_inv": scales}


def _nvfp4(codes: RandomCodes, rows: int, columns: int) -> dict[str, Tensor]:
    return {
        "weight_packed": codes.get((rows, columns // 2)),
        "weight_scale": torch.full((rows, columns // 16), 1.0).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([100.0]),
    }


def _integers(bits: int) -> Callable[[RandomCodes, int, int], dict[str, Tensor]]:
    def make(codes: RandomCodes, rows: int, columns: int) -> dict[str, Tensor]:
        return {
            "weight_packed": codes.get((rows, columns * bits // 8)).view(torch.int32),
            "weight_scale": torch.full((rows, columns // _GROUP), 0.25 / (1 << bits)).bfloat16(),
            "weight_shape": torch.tensor([rows, columns]),
        }

    return make


def _compressed(form: str, **weights: object) -> dict[str, object]:
    """Return the configuration of compressed-tensors for all linear layers but the head."""
    weights |= {"symmetric": True, "dynamic": False}
    return {
        **{"quant_method": "compressed-tensors", "format": form},
        **{"quantization_status": "compressed", "ignore": ["lm_head"]},
        "config_groups": {
            "group_0": {"targets": ["Linear"], "input_activations": None, "weights": weights}
        },
    }


def _packed(bits: int) -> dict[str, object]:
    groups = {"strategy": "group", "group_size": _GROUP}
    return _compressed("pack-quantized", num_bits=bits, type="int", **groups)


_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_SCHEMES: dict[str, tuple[Callable[..., dict[str, Tensor]] | None, dict[str, object]]] = {
    "fp8": (
        _fp8,
        {
            **{"quant_method": "fp8", "activation_scheme": "dynamic"},
            **{"weight_block_size": [_BLOCK, _BLOCK], "modules_to_not_convert": ["lm_head"]},
        },
    ),
    "int4": (_integers(4), _packed(4)),
    "int8": (_integers(8), _packed(8)),
    "nvfp4": (_nvfp4, _compressed("nvfp4-pack-quantized", **_NVFP4)),
    "mxfp4": (
        None,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
                *("model.embed_tokens", "lm_head"),
            ],
        },
    ),
}
"""Codes of a matrix, and the configuration, by scheme. ``mxfp4`` has codes in experts only.

``int4`` and ``int8`` are pack-quantized: q40 and q80 in memory.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    shape: str = option("a shape, as llama-3.1-8b", "shape", default="", nargs="?")
    scheme: str = option("fp8, int4, int8, nvfp4 or mxfp4", "scheme", default="", nargs="?")
    folder: Path | None = option("the folder to write", "folder", type=Path, nargs="?")


def main(argv: list[str]) -> int:
    """Write the folder. Return 0.

    Raises:
        TilewrightError: The shape or the scheme is unknown, or they do not fit.
    """
    words = "Write a folder with a quantized shape and random codes."
    options = parse(_Options, argv, prog="python -m bench random-files", description=words)
    if options.folder is None:
        raise ConfigError("arguments: missing; allowed: SHAPE SCHEME FOLDER")
    write_folder(options.shape, options.scheme, options.folder)
    return 0


def write_folder(shape: str, scheme: str, folder: Path) -> None:
    """Write ``config.json``, an index, and a file per layer."""
    if scheme not in _SCHEMES:
        raise ConfigError(f"scheme {scheme!r}; {allowed(_SCHEMES)}")
    names = load_model(f"shape:{shape}").checkpoint.names
    config = dict(SHAPES[shape])
    model_type = str(config["model_type"])
    if model_type not in _ARCHITECTURES or (scheme == "mxfp4") != (model_type == "gpt_oss"):
        fit = "gpt_oss" if scheme == "mxfp4" else "llama, qwen3, qwen3_moe"
        raise CheckpointError(f"shape {shape}: {scheme} files of {model_type}; allowed: {fit}")
    config |= {"architectures": [_ARCHITECTURES[model_type]], "torch_dtype": "bfloat16"}
    config["quantization_config"] = _with_routers(_SCHEMES[scheme][1], names)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    files: dict[str, list[str]] = {}
    for name in names:
        layer = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{layer}.safetensors", []).append(name)
    codes, index = RandomCodes(), dict[str, str]()
    for file, own in files.items():
        tensors = {n: t for name in own for n, t in _stored(name, names[name].shape, scheme, codes)}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _with_routers(config: Mapping[str, object], names: Iterable[str]) -> dict[str, object]:
    """Return the configuration with all routers in its list of dense modules."""
    routers = [name.removesuffix(".weight") for name in names if name.endswith(f"{_ROUTER}.weight")]
    key = "ignore" if "ignore" in config else "modules_to_not_convert"
    listed = config[key]
    assert isinstance(listed, list)
    return {**config, key: [*listed, *routers]}


def _stored(
    name: str, shape: tuple[int, ...], scheme: str, codes: RandomCodes
) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors of a weight."""
    module, _, role = name.rpartition(".")
    if ".mlp.experts." in name and len(shape) == 3:
        yield from _experts(module, role, shape, codes)
        return
    make = _SCHEMES[scheme][0]
    if make is None or len(shape) != 2 or f".{module}".endswith(_DENSE):
        is_norm = len(shape) == 1 and role == "weight"
        yield name, torch.ones(shape).bfloat16() if is_norm else _dense(shape, codes)
        return
    for key, tensor in make(codes, *shape).items():
        yield f"{module}.{key}", tensor.contiguous()


def _dense(shape: tuple[int, ...], codes: RandomCodes) -> Tensor:
    """Return small bfloat16 values."""
    return ((codes.get(shape).to(torch.bfloat16) - 127.5) / 4096).contiguous()


def _experts(
    module: str, role: str, shape: tuple[int, ...], codes: RandomCodes
) -> Iterator[tuple[str, Tensor]]:
    """Yield MXFP4 tensors of gpt-oss. Gate and up are a single tensor."""
    path, _, matmul = module.rpartition(".")
    if matmul == "up_proj":
        return
    count, rows, columns = shape
    if matmul == "gate_proj":
        matmul, rows = "gate_up_proj", 2 * rows
    if role == "bias":
        yield f"{path}.{matmul}_bias", _dense((count, rows), codes)
        return
    yield f"{path}.{matmul}_blocks", codes.get((count, rows, columns // 32, 16)).clone()
    yield f"{path}.{matmul}_scales", torch.full((count, rows, columns // 32), 121).to(torch.uint8)
