"""What can be known to be wrong with a checkpoint before torch is imported, which takes seconds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tilewright.models.architectures.table import check_model_type, find_gguf_type
from tilewright.models.checkpoints.calibrated.manifest import is_calibrated, read_manifest
from tilewright.models.checkpoints.dllama import header as dllama_header
from tilewright.models.checkpoints.gguf import header as gguf_header
from tilewright.models.checkpoints.gguf.parts import parts_of
from tilewright.models.checkpoints.json_file import read_json
from tilewright.models.checkpoints.mapped_file import map_file
from tilewright.models.checkpoints.quantized.config import METHODS, quantization_of


def check_header(path: Path) -> None:
    """Read what stands before the weights at ``path``, and refuse what opening it would refuse.

    Of a ``.gguf`` file these are its metadata, its table of tensors and its architecture; of a
    ``.m`` file its header; of a folder, that config.json is one and names an architecture that is
    read. What only the architecture's own file can judge is left to `open_checkpoint`.

    Raises:
        CheckpointError: as `open_checkpoint` would.
    """
    if is_calibrated(path):
        read_manifest(path)
        return
    if path.is_dir():
        where = path / "config.json"
        values = read_json(where)
        check_model_type(values.get("model_type"), f"{where}: model_type")
        quantization_of(values, str(where))
        return
    if path.suffix.lower() == ".m":
        dllama_header.read_header(memoryview(map_file(path)), path)
        return
    name = parts_of(path).metadata.get("general.architecture")
    find_gguf_type(name, f"{path}: general.architecture")


def quantised_types(path: Path) -> tuple[str, ...]:
    """The types in blocks that tensors at ``path`` are stored in, as ggml calls them, those of the
    most bytes first; of a folder of safetensors the method of its quantization, if any. None of
    a calibrated folder: its configuration names the formats.

    Raises:
        CheckpointError: as `check_header` would.
    """
    if is_calibrated(path):
        return ()
    if path.is_dir():
        where = path / "config.json"
        config = quantization_of(read_json(where), str(where))
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
