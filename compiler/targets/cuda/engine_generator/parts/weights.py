"""Weights: files, names and shapes. Pickled code is never executed."""

from __future__ import annotations

import json
import math
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.settings import EngineError, Settings

SUFFIXES = (".pt", ".bin", ".safetensors")
WRAPPERS = ("state_dict", "model", "weights")
PREFIXES = ("module.", "_orig_mod.", "model.", "language_model.")
META_NAMES = {"tok_embeddings": "embed_tokens", "output": "lm_head"}
META_NAMES |= {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
META_NAMES |= {f"attention.w{name}": f"self_attn.{name}_proj" for name in "qkvo"}
META_NAMES |= {"feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj"}
META_NAMES |= {"feed_forward.w3": "mlp.up_proj"}
SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}
SAFETENSORS_DTYPES |= {"BF16": torch.bfloat16}


def load_weights(folder: str, settings: Settings) -> dict[str, Tensor]:
    """Load the plan's tensors on the CPU, in the file's types.

    A missing ``lm_head.weight`` is ``embed_tokens.weight``.

    Raises:
        EngineError: for a directory without weights, an unreadable file, a missing tensor, another
            shape, or a bias.
    """
    path = find_weights(folder)
    found = {plain_name(name): tensor for name, tensor in _read(path).items()}
    found.setdefault("lm_head.weight", found.get("embed_tokens.weight", torch.empty(0)))
    shapes = settings.shapes()
    if wrong := [n for n in found if n.endswith(".bias") and n[:-4] + "weight" in shapes]:
        raise EngineError(f"{path}: {wrong[0]}; expected: no biases")
    for name, shape in shapes.items():
        if name not in found:
            raise EngineError(f"{path}: no {name}; expected: of shape {list(shape)}")
        if tuple(found[name].shape) != shape:
            was = list(found[name].shape)
            raise EngineError(f"{path}: {name} of shape {was}; expected: {list(shape)}")
        if not found[name].is_floating_point():
            raise EngineError(f"{path}: {name} of {found[name].dtype}; expected: floats")
    return settings.prepared({name: found[name] for name in shapes})


def find_weights(folder: str) -> Path:
    """Return ``model.pt``, else the first *.pt, *.bin or *.safetensors of a directory."""
    if not Path(folder).is_dir():
        raise EngineError(f"{folder}: no such folder; allowed: one with the model's weights")
    if (Path(folder) / "model.pt").is_file():
        return Path(folder) / "model.pt"
    for suffix in SUFFIXES:
        if files := sorted(Path(folder).glob(f"*{suffix}")):
            return files[0]
    raise EngineError(f"{folder}: no weights; allowed: model.pt, *.pt, *.bin, *.safetensors")


def plain_name(name: str) -> str:
    """Return a tensor's Hugging Face name, without wrapper prefixes. Converts Meta's names."""
    while prefix := next((each for each in PREFIXES if name.startswith(each)), ""):
        name = name.removeprefix(prefix)
    match = re.match(r"layers\.\d+\.", name)
    layer = match[0] if match else ""
    inner, dot, kind = name.removeprefix(layer).rpartition(".")
    return layer + META_NAMES.get(inner, inner) + dot + kind


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        is_part = "-of-" in path.stem  # a split model
        parts = sorted(path.parent.glob("*-of-*.safetensors")) if is_part else [path]
        return {name: tensor for part in parts for name, tensor in _read_safetensors(part).items()}
    try:
        mapped = zipfile.is_zipfile(path)  # older files cannot be mapped into memory
        state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).partition("\n")[0][:160]
        raise EngineError(
            f"{path}: not a file of tensors alone, and nothing of it was run ({reason})"
        ) from None
    for wrapper in WRAPPERS:
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    if not isinstance(state, Mapping):
        raise EngineError(f"{path}: a {type(state).__name__}; expected: a state dict")
    return {str(name): value for name, value in state.items() if isinstance(value, Tensor)}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the length of the header (8 bytes), the JSON header, and the tensors."""
    size = path.stat().st_size
    storage = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    found = {}
    try:
        start = 8 + int.from_bytes(bytes(storage[:8].tolist()), "little")
        header = json.loads(bytes(storage[8:start].tolist()))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if not (dtype := SAFETENSORS_DTYPES.get(entry["dtype"])):
                continue  # not a float; reported below if needed
            first, last = (start + offset for offset in entry["data_offsets"])
            if not 0 <= first <= last <= size:
                raise EngineError(f"{path}: {name} is not inside the file")
            values = storage[first:last]
            values = values.clone() if first % dtype.itemsize else values
            if last - first != math.prod(entry["shape"]) * dtype.itemsize:
                raise EngineError(f"{path}: {name} has {last - first} bytes, not its shape's")
            found[name] = values.view(dtype).view(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"{path}: not a safetensors file ({str(error)[:160]})") from None
    return found
