"""Interface of all checkpoint containers: configuration, tensor names and shapes, lazy tensors.

Names and row order are Hugging Face's in every container. Containers are defined elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tilewright.errors import CheckpointError, allowed

if TYPE_CHECKING:
    from torch import Tensor

    from tilewright.models.config import ModelConfig

HASH_WINDOW = 4096
HASH_NUM_WINDOWS = 16
HASH_WHOLE = HASH_WINDOW * HASH_NUM_WINDOWS


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor's shape (Hugging Face's, rows first), stored type, and bytes in the file."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """A tokenizer's location: a directory, a ``.t`` file, or a GGUF file's ``metadata``."""

    path: Path
    metadata: Mapping[str, object] | None = None


Rows: TypeAlias = "slice | tuple[slice, slice] | None"
"""Rows to read. See `Checkpoint.get`."""


class Checkpoint(Protocol):
    """Weights on disk, read lazily, or random weights, generated on demand."""

    @property
    def path(self) -> Path:
        """Return the opened file or directory. For random weights, their name in messages."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Return all files with configuration and weights. Random weights have none."""

    @property
    def config(self) -> ModelConfig:
        """Return the checked model configuration."""

    @property
    def names(self) -> Mapping[str, TensorMeta]:
        """Return all tensors by Hugging Face name. A tied ``lm_head.weight`` is omitted."""

    @property
    def tokenizer_source(self) -> TokenizerSource:
        """Return the location for `tilewright.models.tokenizer.load.load_tokenizer`."""

    def get(self, name: str, rows: Rows = None, columns: slice | None = None) -> Tensor:
        """Return a new tensor, or a slice.

        A file's tensor is on the CPU, a random tensor on torch's default device. fp32, fp16 and
        bf16 retain their type. Quantized types become float32.

        Args:
            name: Tensor name.
            rows: Slice of the first axis (step 1), or a pair of slices for the first two axes.
            columns: The last axis's slice.

        Raises:
            CheckpointError: The name is unknown, or bytes are unreadable.
        """

    def stored_type(self, name: str) -> str:
        """Return a tensor's stored type without reading it: ``F32``, ``BF16``, ``Q4_1``.

        Joined tensors have all their types, ``Q4_0+Q8_0``. The result is ``F32`` if `get` returns
        different values or columns from the file's.

        Raises:
            CheckpointError: The name is unknown.
        """

    def content_hash(self) -> str:
        """Return `content_hash` over this checkpoint's files."""


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a checkpoint's tensors with the model's expected shapes.

    Raises:
        CheckpointError: A tensor is missing, unexpected or has the wrong shape.
    """
    names = checkpoint.names
    for name, shape in expected.items():
        check_shape(checkpoint.path, name, names[name].shape if name in names else None, shape)
    extra = [name for name in names if name not in expected]
    if extra:
        shape = names[extra[0]].shape
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise CheckpointError(
            f"{checkpoint.path}: tensor {shown(extra[0])} of shape {list(shape)}{more} is not "
            "part of the model that its configuration describes; allowed: the model's tensors only"
        )


def check_shape(
    path: Path, name: str, found: tuple[int, ...] | None, expected: tuple[int, ...]
) -> None:
    """Check a tensor's shape. None means a missing tensor.

    Raises:
        CheckpointError: The tensor is missing or has the wrong shape. The message has both shapes.
    """
    if found is None:
        raise CheckpointError(
            f"{path}: tensor {shown(name)} of shape {list(expected)} is missing; "
            "allowed: all tensors of the model that its configuration describes"
        )
    if found != tuple(expected):
        raise CheckpointError(
            f"{path}: tensor {shown(name)} has shape {list(found)}; "
            f"allowed: {list(expected)}, by its configuration"
        )


def shown(name: str) -> str:
    """Return a file's tensor name in printable, limited form."""
    return name[:120] if name.isprintable() else repr(name[:120])


def unknown_tensor(path: Path, name: str, names: Iterable[str]) -> CheckpointError:
    """Return the error for an unknown name in ``get``."""
    if name == "lm_head.weight":
        return CheckpointError(
            f"{path}: lm_head.weight is tied to the embedding; allowed: model.embed_tokens.weight"
        )
    return CheckpointError(
        f"{path}: no tensor {shown(name)}; {allowed(map(shown, sorted(names)[:8]))}"
    )


def row_range(rows: slice | None, num_rows: int) -> tuple[int, int]:
    """Return the first row and the end of ``rows`` within the tensor. None: all rows."""
    start, stop, step = (rows or slice(None)).indices(num_rows)
    assert step == 1, "rows are read with step 1"
    return start, max(start, stop)


def outer_rows(rows: Rows) -> slice | None:
    """Return the first axis's slice."""
    return rows[0] if isinstance(rows, tuple) else rows


def inner_part(values: Tensor, rows: Rows, columns: slice | None) -> Tensor:
    """Slice the second axis and the columns. The first axis is already sliced."""
    if isinstance(rows, tuple):
        values = values[:, rows[1]]
    if columns is not None:
        values = values[..., columns]
    return values.contiguous()


def content_hash(
    headers: Iterable[tuple[int, bytes]],
    tensors: Iterable[tuple[str, int, Callable[[int, int], bytes]]],
) -> str:
    """Return a stable checkpoint identity, 64 hexadecimal digits. It is fast for large files.

    The hash covers file sizes, whole headers (names, shapes, types, metadata), and each tensor's
    stored bytes up to 64 KiB. Larger tensors contribute 16 evenly spaced windows of 4 KiB. A change
    between the windows is not detected.

    Args:
        headers: File size in bytes and header bytes, per file.
        tensors: Name, stored bytes, and a function returning its bytes [start, stop).
    """
    digest = hashlib.sha256(b"tilewright checkpoint 1")
    for size, header in headers:
        digest.update(f"file {size} {len(header)}\n".encode())
        digest.update(header)
    for name, nbytes, read in sorted(tensors, key=lambda entry: entry[0]):
        digest.update(f"tensor {name} {nbytes}\n".encode())
        if nbytes <= HASH_WHOLE:
            digest.update(read(0, nbytes))
            continue
        for window in range(HASH_NUM_WINDOWS):
            start = (nbytes - HASH_WINDOW) * window // (HASH_NUM_WINDOWS - 1)
            digest.update(read(start, start + HASH_WINDOW))
    return digest.hexdigest()
