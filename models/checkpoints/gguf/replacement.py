"""GGUF export for calibrated folders: the original's metadata with calibrated codes."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from tilewright.compiler.formats.ggml_blocks import Bytes
from tilewright.errors import CheckpointError, allowed
from tilewright.models.checkpoints.calibrated.checkpoint import CalibratedCheckpoint
from tilewright.models.checkpoints.gguf.checkpoint import GGUFCheckpoint
from tilewright.models.checkpoints.gguf.header import MAGIC, TENSOR_TYPES, GGUFHeader, header_of
from tilewright.models.checkpoints.mapped_file import map_file

_VERSION = 3
_U32_PAIR = 16
"""Bytes of a metadata pair with a 32-bit value, without its key."""
_FILE_TYPE, _SPLIT = "general.file_type", "split."
_FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q5_0": 8}
_HEAD, _OUTPUT = "lm_head.weight", "output.weight"


@dataclass(frozen=True, slots=True)
class _GgufEntry:
    """A tensor of the new file: ``name`` in GGUF, ``source`` in the calibrated folder."""

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def write_replacement(
    original: GGUFCheckpoint,
    calibrated: CalibratedCheckpoint,
    file: BinaryIO,
    progress: Callable[[str, int, int], None],
) -> None:
    """Write the original's file with the calibrated folder's tensors.

    Raises:
        CheckpointError: A format has no GGUF type, or the model differs.
        OSError: ``file`` cannot be written.
    """
    if original.content_hash() != calibrated.facts.original:
        raise CheckpointError(
            f"{original.path}: not the file that {calibrated.path} was calibrated from; allowed: "
            "that file"
        )
    entries = list(_entries(original, calibrated))
    header = header_of(original.path)
    file.write(_header(original.path, header, entries))
    for done, entry in enumerate(entries):
        data = _data(original, calibrated, entry)
        assert data.nbytes == entry.nbytes, entry.name
        file.write(data.tobytes() + bytes(-data.nbytes % header.alignment))
        progress("weights", done + 1, len(entries))


def _entries(original: GGUFCheckpoint, calibrated: CalibratedCheckpoint) -> Iterator[_GgufEntry]:
    for name, tensor in original.stored_tensors():
        yield _entry(tensor.name, name, calibrated)
    if _HEAD in calibrated.names and _HEAD not in original.names:
        yield _entry(_OUTPUT, _HEAD, calibrated)


def _entry(name: str, source: str, calibrated: CalibratedCheckpoint) -> _GgufEntry:
    meta, codes = calibrated.names[source], calibrated.calibrated(source)
    if codes is not None and meta.dtype == "F32":
        raise CheckpointError(
            f"{calibrated.path}: {source} has codes of {codes[0]} along {codes[1]}; "
            + allowed(("q40, q50 and q80 along in, as precision all-q40",))
        )
    _, block, block_bytes = TENSOR_TYPES[meta.dtype]
    nbytes = math.prod(meta.shape) // block * block_bytes
    return _GgufEntry(name, source, meta.shape, meta.dtype, nbytes)


def _data(original: GGUFCheckpoint, calibrated: CalibratedCheckpoint, entry: _GgufEntry) -> Bytes:
    """Return a tensor's bytes, rows in the file's order."""
    if entry.dtype in ("F32", "F16", "BF16"):
        rows: Bytes = calibrated.get(entry.source).contiguous().view(torch.uint8).numpy()
        rows = rows.reshape(entry.shape[0], -1)
    else:
        rows = calibrated.stored(entry.source)[1]
    order = original.row_order(entry.source)
    if order is None:
        return rows
    placed = np.empty_like(rows)
    placed[order] = rows
    return placed


def _header(path: Path, original: GGUFHeader, entries: list[_GgufEntry]) -> bytes:
    """Return everything before the data.

    The metadata is the original's without its split, and with the new file's type.
    """
    data = map_file(path)
    kept = {key: span for key, span in original.spans.items() if not key.startswith(_SPLIT)}
    head = bytearray(MAGIC + struct.pack("<IQQ", _VERSION, len(entries), len(kept)))
    types = [entry.dtype for entry in entries if entry.dtype in _FILE_TYPES]
    for key, (first, end) in kept.items():
        head += bytes(data[first:end])
        if key == _FILE_TYPE and types and end - first == len(key) + _U32_PAIR:
            head[-4:] = struct.pack("<I", _FILE_TYPES[max(types, key=types.count)])
    at = 0
    for entry in entries:
        name = entry.name.encode()
        head += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(entry.shape))
        head += struct.pack(f"<{len(entry.shape)}Q", *reversed(entry.shape))
        head += struct.pack("<IQ", TENSOR_TYPES[entry.dtype][0], at)
        at += entry.nbytes + -entry.nbytes % original.alignment
    return bytes(head) + bytes(-len(head) % original.alignment)
