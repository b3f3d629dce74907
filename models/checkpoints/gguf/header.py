"""A GGUF file's header: metadata and tensor table, read from untrusted bytes.

Every count and length is checked against the remaining bytes before allocation. The meanings of
metadata and tensors are defined elsewhere.
"""

from __future__ import annotations

import functools
import math
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewright.errors import CheckpointError, allowed
from tilewright.models.checkpoints.mapped_file import map_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SETTLED_NS = 3_000_000_000
_SCALARS: Mapping[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_VALUE_TYPES = (*_SCALARS, _STRING, _ARRAY)

# name -> (type id, elements per block, bytes per block); ggml's block layouts.
TENSOR_TYPES: Mapping[str, tuple[int, int, int]] = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "BF16": (30, 1, 2),
    "Q8_0": (8, 32, 34),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "IQ4_NL": (20, 32, 18),
    "IQ4_XS": (23, 256, 136),
    "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66),
    "MXFP4": (39, 32, 17),
    "NVFP4": (40, 64, 36),
    "IQ2_XXS": (16, 256, 66),
    "IQ2_XS": (17, 256, 74),
    "IQ2_S": (22, 256, 82),
    "IQ3_XXS": (18, 256, 98),
    "IQ3_S": (21, 256, 110),
    "IQ1_S": (19, 256, 50),
    "IQ1_M": (29, 256, 56),
}
_TYPE_NAMES = {entry[0]: name for name, entry in TENSOR_TYPES.items()}
# ggml's unsupported types, for error messages.
_REFUSED = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    41: "Q1_0",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor's shape (rows first), type, and its bytes [start, start + nbytes) in the file.

    Attributes:
        part: The file's index, for a model in several files.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    nbytes: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The header before the tensor data.

    Metadata values are bool, int, float, str, list[str] or numpy arrays with numbers.

    Attributes:
        nbytes: The tensor data's offset.
        alignment: Alignment of tensors in bytes.
        spans: First byte and end of every metadata pair: key, type and value.
    """

    metadata: Mapping[str, object]
    tensors: Mapping[str, GGUFTensor]
    nbytes: int
    alignment: int
    spans: Mapping[str, tuple[int, int]]


class _HeaderCursor:
    """A position in the file with bounds checks."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {what}; the GGUF file is cut short or corrupt; allowed: a complete file"
        )

    def take(self, num_bytes: int, what: str) -> memoryview:
        left = len(self.data) - self.at
        if num_bytes > left:
            raise self.error(f"{what} at byte {self.at} needs {num_bytes} bytes, {left} are left")
        self.at += num_bytes
        return self.data[self.at - num_bytes : self.at]

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, each: int) -> int:
        """Read a count. Each counted item needs at least ``each`` bytes in the file."""
        start, count = self.at, self.u64(what)
        left = len(self.data) - self.at
        if count * each > left:
            raise self.error(f"{what} at byte {start} is {count}, but {left} bytes are left")
        return count

    def string(self, what: str) -> str:
        raw = self.take(self.u64(f"length of {what}"), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} before byte {self.at} is not UTF-8") from None


def header_of(path: Path) -> GGUFHeader:
    """Return the GGUF file's header at ``path``. See `read_header`.

    Reading a vocabulary is slow, and commands use the header repeatedly. The last header is cached
    while the file system reports no change.
    """
    try:
        found = path.stat()
    except OSError:
        return read_header(memoryview(map_file(path)), path)
    if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) < _SETTLED_NS:
        # A later write could have the same times.
        return read_header(memoryview(map_file(path)), path)
    times = (found.st_mtime_ns, found.st_ctime_ns)
    return _settled_header(path, (found.st_dev, found.st_ino, found.st_size, *times))


@functools.lru_cache(maxsize=1)
def _settled_header(path: Path, state: tuple[int, ...]) -> GGUFHeader:
    return read_header(memoryview(map_file(path)), path)


def read_header(data: memoryview, path: Path) -> GGUFHeader:
    """Parse the header in ``data``, a GGUF file's bytes.

    Raises:
        CheckpointError: A field is invalid or exceeds the file.
    """
    cursor = _HeaderCursor(data, path)
    if bytes(cursor.take(4, "magic")) != MAGIC:
        raise CheckpointError(
            f"{path}: not a GGUF file (it does not begin with {MAGIC.decode()}); allowed: "
            "a file that does"
        )
    version = cursor.u32("version")
    if version not in VERSIONS:
        raise CheckpointError(
            f"{path}: GGUF version {version} is not read (a big-endian file looks like this too); "
            + allowed(VERSIONS)
        )
    num_tensors = cursor.count("number of tensors", 24)
    num_pairs = cursor.count("number of metadata keys", 13)
    metadata: dict[str, object] = {}
    spans: dict[str, tuple[int, int]] = {}
    for _ in range(num_pairs):
        first = cursor.at
        key = cursor.string("metadata key")
        if key in metadata:
            raise cursor.error(f"metadata key {key[:80]!r} stands twice")
        metadata[key] = _value(cursor, key[:80])
        spans[key] = first, cursor.at
    table = [_tensor_row(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        not isinstance(alignment, int)
        or not 1 <= alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise cursor.error(f"general.alignment = {alignment!r} is not a power of two up to 2**20")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, dtype, offset in table:
        if name in tensors:
            raise cursor.error(f"tensor {name[:80]!r} stands twice")
        if offset % alignment:
            raise cursor.error(f"offset {offset} of tensor {name[:80]!r} is not aligned")
        nbytes = _stored_bytes(shape, dtype)
        if start + offset + nbytes > len(data):
            raise cursor.error(
                f"tensor {name[:80]!r} ends at byte {start + offset + nbytes} of {len(data)}"
            )
        tensors[name] = GGUFTensor(name, shape, dtype, start + offset, nbytes)
    _refuse_overlaps(cursor, tensors)
    return GGUFHeader(metadata, tensors, min(start, len(data)), alignment, spans)


def _value(cursor: _HeaderCursor, key: str) -> object:
    kind = cursor.u32(f"type of {key!r}")
    if kind == _STRING:
        return cursor.string(f"value of {key!r}")
    if kind == _ARRAY:
        return _array(cursor, key)
    if kind not in _SCALARS:
        raise cursor.error(f"type {kind} of {key!r} is unknown ({allowed(_VALUE_TYPES)})")
    dtype = np.dtype(_SCALARS[kind])
    value = np.frombuffer(cursor.take(dtype.itemsize, f"value of {key!r}"), dtype)[0]
    if dtype == np.float32:
        return float(str(value))  # the intended decimal: 1e-05, not 9.999999747378752e-06
    return bool(value) if kind == _BOOL else value.item()


def _array(cursor: _HeaderCursor, key: str) -> object:
    kind = cursor.u32(f"element type of {key!r}")
    if kind in _SCALARS:
        dtype = np.dtype(_SCALARS[kind])
        count = cursor.count(f"length of {key!r}", dtype.itemsize)
        values = np.frombuffer(cursor.take(count * dtype.itemsize, f"values of {key!r}"), dtype)
        return values.astype(bool) if kind == _BOOL else values.copy()
    if kind != _STRING:
        raise cursor.error(
            f"element type {kind} of {key!r} is not read ({allowed((*_SCALARS, _STRING))})"
        )
    count = cursor.count(f"length of {key!r}", 8)
    return _strings(cursor, key, count)


def _strings(cursor: _HeaderCursor, key: str, count: int) -> list[str]:
    """Read a vocabulary with hundreds of thousands of strings. The loop is flat for speed."""
    data, at, size = cursor.data, cursor.at, len(cursor.data)
    length_of = struct.Struct("<Q").unpack_from
    strings: list[str] = []
    try:
        for _ in range(count):
            (length,) = length_of(data, at)
            at += 8 + length
            if at > size:
                cursor.at = at - length
                cursor.take(length, f"string {len(strings)} of {key!r}")
            strings.append(str(data[at - length : at], "utf-8"))
    except struct.error:
        cursor.at = at
        cursor.take(8, f"length of string {len(strings)} of {key!r}")
    except UnicodeDecodeError:
        raise cursor.error(f"string {len(strings)} of {key!r} is not UTF-8") from None
    cursor.at = at
    return strings


def _tensor_row(cursor: _HeaderCursor) -> tuple[str, tuple[int, ...], str, int]:
    name = cursor.string("tensor name")
    shown = repr(name[:80])
    num_dims = cursor.u32(f"number of axes of tensor {shown}")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.error(f"tensor {shown} has {num_dims} axes (allowed: 1 to {MAX_DIMS})")
    # The file lists the fastest axis first.
    dims = [cursor.u64(f"axis of tensor {shown}") for _ in range(num_dims)][::-1]
    if min(dims) < 1:
        raise cursor.error(f"tensor {shown} has shape {dims}, with an axis below 1")
    kind = cursor.u32(f"type of tensor {shown}")
    if kind not in _TYPE_NAMES:
        name_of_kind = _REFUSED.get(kind, str(kind))
        raise CheckpointError(
            f"{cursor.path}: tensor {shown} has type {name_of_kind}, which is not read; "
            + allowed(TENSOR_TYPES)
        )
    dtype = _TYPE_NAMES[kind]
    block = TENSOR_TYPES[dtype][1]
    if dims[-1] % block:
        raise cursor.error(f"tensor {shown} has rows of {dims[-1]}, not a multiple of {block}")
    return name, tuple(dims), dtype, cursor.u64(f"offset of tensor {shown}")


def _stored_bytes(shape: tuple[int, ...], dtype: str) -> int:
    _, block, block_bytes = TENSOR_TYPES[dtype]
    return math.prod(shape) // block * block_bytes


def _refuse_overlaps(cursor: _HeaderCursor, tensors: Mapping[str, GGUFTensor]) -> None:
    """Check that tensors do not overlap. Together they then fit in the file."""
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        if tensor.start < end:
            raise cursor.error(f"tensor {tensor.name[:80]!r} overlaps the one before it")
        end = tensor.start + tensor.nbytes
