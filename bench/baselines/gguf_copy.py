"""Conversion to another GGUF type, for baselines."""

from __future__ import annotations

import hashlib
import tempfile
from importlib import metadata
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quant_shape_to_byte_shape, quantize

from tilewright.errors import ConfigError

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_ARCHITECTURE, _FILE_TYPE = "general.architecture", "general.file_type"


def cache_name(source: Path, *parts: str) -> str:
    """Return a cache name for a converted model, from all conversion inputs."""
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return f"{source.stem}-{key}"


def cached_gguf(source: Path, gguf_type: str, *, content_hash: str, folder: Path) -> Path:
    """Return the converted file in a cache folder. Write the file if it is missing."""
    name = cache_name(source, content_hash, gguf_type, metadata.version("gguf"))
    path = folder / f"{name}.{gguf_type}.gguf"
    if not path.is_file():
        write_gguf(source, path, gguf_type)
    return path


def write_gguf(source: Path, destination: Path, gguf_type: str) -> None:
    """Write ``source`` with matrices in ``gguf_type`` and vectors in F32.

    The file appears whole or not at all. Metadata and tokenizer are copied.

    Raises:
        ConfigError: if a row is no multiple of the block size, or the file cannot be written.
    """
    wanted, plain = gguf.GGMLQuantizationType[gguf_type], gguf.GGMLQuantizationType.F32
    reader = gguf.GGUFReader(source)
    types = {each.name: wanted if len(each.shape) > 1 else plain for each in reader.tensors}
    for tensor in reader.tensors:
        block, row = gguf.GGML_QUANT_SIZES[types[tensor.name]][0], int(tensor.shape[0])
        if row % block:
            raise ConfigError(
                f"{source}: tensor {tensor.name} has rows of {row} values; allowed in "
                f"{types[tensor.name].name}: multiples of {block}"
            )
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination.parent) as scratch:
            whole = Path(scratch) / destination.name
            _write(reader, whole, types, gguf_type)
            whole.replace(destination)
    except OSError as error:
        raise ConfigError(f"{destination}: cannot be written: {error.strerror}") from None


def gguf_sizes(path: Path) -> tuple[int, int]:
    """Return the bytes in all tensors, and the bytes read by a decode step."""
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
    total = sum(sizes.values())
    return total, total - (sizes[_EMBEDDING] if _HEAD in sizes else 0)


def _write(
    reader: gguf.GGUFReader, path: Path, types: dict[str, gguf.GGMLQuantizationType], gguf_type: str
) -> None:
    file_type = int(gguf.LlamaFileType["ALL_F32" if gguf_type == "F32" else f"MOSTLY_{gguf_type}"])
    writer = gguf.GGUFWriter(path, reader.fields[_ARCHITECTURE].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == _ARCHITECTURE:
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        value = file_type if name == _FILE_TYPE else field.contents()
        writer.add_key_value(
            name, value, field.types[0], sub_type=field.types[-1] if is_array else None
        )
    for tensor in reader.tensors:
        own = types[tensor.name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        stored = quant_shape_to_byte_shape(shape, own)
        is_float = own == gguf.GGMLQuantizationType.F32
        size, dtype = int(np.prod(stored)), np.dtype(np.float32 if is_float else np.uint8)
        writer.add_tensor_info(tensor.name, shape if is_float else stored, dtype, size, own)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            writer.write_tensor_data(quantize(values, types[tensor.name]))
    finally:
        writer.close()
