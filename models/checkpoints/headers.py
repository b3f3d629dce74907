"""Early checks of checkpoints, before the import of torch, which takes seconds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tilewright.models.architectures.table import check_model_type, find_gguf_type
from tilewright.models.checkpoints.calibrated.manifest import is_calibrated, read_manifest
from tilewright.models.checkpoints.dllama import header as dllama_header
from tilewright.models.checkpoints.gguf import header as gguf_header
from tilewright.models.checkpoints.gguf.parts import parts_of
from tilewright.models.checkpoints.mapped_file import map_file
from tilewright.models.checkpoints.quantized.config import METHODS, quantization_of, read_config


def check_header(path: Path) -> None:
    """Read the header at ``path``, before the weights, and check it as `open_checkpoint` does.

    A ``.gguf`` header has metadata, a tensor table and an architecture. A ``.m`` file has a header.
    A directory needs a valid config.json with a supported architecture. Checks by an architecture's
    own file are left to `open_checkpoint`.

    Raises:
        CheckpointError: As `open_checkpoint`.
    """
    if is_calibrated(path):
        read_manifest(path)
        return
    if path.is_dir():
        where = path / "config.json"
        values = read_config(path)
        check_model_type(values.get("model_type"), f"{where}: model_type")
        quantization_of(values, str(where))
        return
    if path.suffix.lower() == ".m":
        dllama_header.read_header(memoryview(map_file(path)), path)
        return
    name = parts_of(path).metadata.get("general.architecture")
    find_gguf_type(name, f"{path}: general.architecture")


def quantised_types(path: Path) -> tuple[str, ...]:
    """Return the block types of tensors at ``path`` by ggml name, largest total size first.

    A safetensors directory returns its quantization method, if any. A calibrated directory returns
    none: its configuration names the formats.

    Raises:
        CheckpointError: As `check_header`.
    """
    if is_calibrated(path):
        return ()
    if path.is_dir():
        where = path / "config.json"
        config = quantization_of(read_config(path), str(where))
        return () if config is None else (METHODS[str(config["quant_method"])],)
    sizes: Counter[str] = Counter()
    if path.suffix.lower() == ".m":
        header, _ = dllama_header.read_header(memoryview(map_file(path)), path)
        for each in dllama_header.tensors(header):
            sizes[each.dtype] += each.nbytes
    else:
        for tensor in parts_of(path).tensors.values():
            sizes[tensor.dtype] += tensor.nbytes
    in_blocks = (name for name, _ in sizes.most_common())
    return tuple(name for name in in_blocks if gguf_header.TENSOR_TYPES[name][1] > 1)
