"""A GGUF file again in another type: the same values, quantised anew, for engines that read GGUF.

Rows keep the source's order, which GGUF's readers expect; metadata and tokenizer are copied.
"""

from __future__ import annotations

import tempfile
from importlib import metadata
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quant_shape_to_byte_shape, quantize

from bench.peers.worker import Loaded, cache_name
from tilewright.errors import ConfigError

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_WRITTEN_BY_WRITER = "general.architecture"
_FILE_TYPE = "general.file_type"


def cached_gguf(source: Path, kind: str, *, content_hash: str, folder: Path) -> Path:
    """The copy of ``source`` in ``kind`` in a cache folder, written if it is not there.

    ``content_hash``: of the source; with the type and gguf's version it names the copy.
    """
    name = cache_name(source, content_hash, kind, metadata.version("gguf"))
    path = folder / f"{name}.{kind}.gguf"
    if not path.is_file():
        write_gguf(source, path, kind)
    return path


def write_gguf(source: Path, destination: Path, kind: str) -> None:
    """Write ``source`` with every matrix, the embedding's too, in ``kind``, all else in F32.

    The file appears whole or not at all. Tensors pass through memory one at a time.

    Raises:
        ConfigError: where a matrix's rows are no whole number of blocks, or it cannot be written.
    """
    wanted = gguf.GGMLQuantizationType[kind]
    reader = gguf.GGUFReader(source)
    types = {
        tensor.name: wanted if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
        for tensor in reader.tensors
    }
    _check_rows(source, reader, types)
    file_type = int(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination.parent) as scratch:
            whole = Path(scratch) / destination.name
            _write(reader, whole, types, file_type=file_type)
            whole.replace(destination)
    except OSError as error:
        raise ConfigError(f"{destination}: cannot be written: {error.strerror}") from None


def gguf_sizes(path: Path) -> Loaded:
    """Bytes of a file's tensors; a step reads all but an embedding that is not the head too."""
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
    total = sum(sizes.values())
    return Loaded(total, total - (sizes[_EMBEDDING] if _HEAD in sizes else 0))


def _check_rows(
    source: Path, reader: gguf.GGUFReader, types: dict[str, gguf.GGMLQuantizationType]
) -> None:
    for tensor in reader.tensors:
        block, row = gguf.GGML_QUANT_SIZES[types[tensor.name]][0], int(tensor.shape[0])
        if row % block:
            raise ConfigError(
                f"{source}: tensor {tensor.name} has rows of {row} values; allowed in "
                f"{types[tensor.name].name}: multiples of {block}"
            )


def _write(
    reader: gguf.GGUFReader,
    path: Path,
    types: dict[str, gguf.GGMLQuantizationType],
    *,
    file_type: int,
) -> None:
    writer = gguf.GGUFWriter(path, reader.fields[_WRITTEN_BY_WRITER].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == _WRITTEN_BY_WRITER:
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        value = file_type if name == _FILE_TYPE else field.contents()
        writer.add_key_value(
            name, value, field.types[0], sub_type=field.types[-1] if is_array else None
        )
    for tensor in reader.tensors:
        kind = types[tensor.name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        stored = quant_shape_to_byte_shape(shape, kind)
        is_float = kind == gguf.GGMLQuantizationType.F32
        writer.add_tensor_info(
            tensor.name,
            shape if is_float else stored,
            np.dtype(np.float32 if is_float else np.uint8),
            int(np.prod(stored)),
            kind,
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            writer.write_tensor_data(quantize(values, types[tensor.name]))
    finally:
        writer.close()
