"""Importance matrices of llama.cpp: mean squares for each weight's inputs.

Both file formats are read: GGUF and the older binary format. Expert matrices are skipped.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tilewright.errors import CheckpointError, one_line
from tilewright.models.checkpoints.gguf.checkpoint import hf_name
from tilewright.models.checkpoints.gguf.header import MAGIC, read_header
from tilewright.utils.files import read_regular

_MAX_ENTRIES, _MAX_NAME = 1 << 20, 1 << 10
_SUMS, _COUNTS = ".in_sum2", ".counts"
_ALLOWED = "allowed: an imatrix file of llama.cpp"


def read_imatrix(path: Path) -> dict[str, Tensor]:
    """Return mean squares, float32 ``[inputs]``, by Hugging Face's weight name.

    Raises:
        CheckpointError: for a missing file, or no imatrix file.
    """
    try:
        data = read_regular(path)
        found = _read_gguf(data, path) if data[:4] == MAGIC else _read_binary(data)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {_ALLOWED}") from None
    except (ValueError, KeyError, IndexError, struct.error) as error:
        raise CheckpointError(
            f"{path}: not an imatrix file: {one_line(error)}; {_ALLOWED}"
        ) from None
    named = {hf_name(name): torch.from_numpy(values) for name, values in found.items()}
    if not named:
        raise CheckpointError(f"{path}: no entries; {_ALLOWED}")
    for name, values in named.items():
        if not bool(values.isfinite().all()) or bool((values < 0).any()):
            raise CheckpointError(
                f"{path}: {name}: values are negative, NaN or infinite; allowed: from 0, finite"
            )
    return named


def _read_binary(data: bytes) -> dict[str, np.ndarray]:
    """Read a count, then for each entry its name, its number of calls and its values."""

    def integer(at: int) -> int:
        value: int = struct.unpack_from("<i", data, at)[0]
        return value

    count, at = integer(0), 4
    if not 0 < count <= _MAX_ENTRIES:
        raise ValueError(f"{count} entries")
    found: dict[str, np.ndarray] = {}
    for _ in range(count):
        length = integer(at)
        if not 0 < length <= _MAX_NAME:
            raise ValueError(f"a name of {length} bytes")
        name = data[at + 4 : at + 4 + length].decode("utf-8")
        at += 4 + length
        calls, size = integer(at), integer(at + 4)
        at += 8
        if size < 0 or at + 4 * size > len(data):
            raise ValueError(f"{name}: {size} values in {len(data) - at} bytes")
        values = np.frombuffer(data, "<f4", size, at).astype(np.float32)
        found[name] = values / max(1, calls)
        at += 4 * size
    return found


def _read_gguf(data: bytes, path: Path) -> dict[str, np.ndarray]:
    tensors = read_header(memoryview(data), path).tensors

    def values_of(name: str) -> np.ndarray:
        tensor = tensors[name]
        if tensor.dtype != "F32":
            raise ValueError(f"{name} is {tensor.dtype}; allowed: F32")
        return np.frombuffer(data, "<f4", tensor.nbytes // 4, tensor.start)

    found = {}
    for stem in (name.removesuffix(_SUMS) for name in tensors if name.endswith(_SUMS)):
        counts = values_of(stem + _COUNTS)
        if counts.size == 1:
            found[stem] = values_of(stem + _SUMS) / np.float32(max(1.0, float(counts[0])))
    return found
