"""What every container offers: a configuration, tensor names and shapes, and one tensor at a time.

Names and row order are Hugging Face's for every container. It does not know the containers.
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
    """A tensor's shape (Hugging Face's, rows first), its stored type, and its bytes in the file."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Where the tokenizer is: a folder's files, a ``.t`` file, or a GGUF file's ``metadata``."""

    path: Path
    metadata: Mapping[str, object] | None = None


Rows: TypeAlias = "slice | tuple[slice, slice] | None"
"""Which rows of a tensor are read; see `Checkpoint.get`."""


class Checkpoint(Protocol):
    """Weights on disk, read lazily, or random ones, made when asked for."""

    @property
    def path(self) -> Path:
        """The file or folder that was opened; of random weights, what messages call them."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that configuration and weights are read from: none for random weights."""

    @property
    def config(self) -> ModelConfig:
        """The model's configuration, checked."""

    @property
    def names(self) -> Mapping[str, TensorMeta]:
        """Every tensor by its Hugging Face name; ``lm_head.weight`` only where it is not tied."""

    @property
    def tokenizer_source(self) -> TokenizerSource:
        """Where the tokenizer is, for `tilewright.models.tokenizer.load.load_tokenizer`."""

    def get(self, name: str, rows: Rows = None, columns: slice | None = None) -> Tensor:
        """One tensor, or a part of it, as a fresh tensor: some ``rows`` of its first axis (step 1),
        or of its first two where a pair of slices is given, and some ``columns`` of its last.

        It is on the CPU when read from a file, on torch's default device when random.
        fp32, fp16 and bf16 keep their type; quantised types come out as float32.

        Raises:
            CheckpointError: a name that is not there, or bytes that cannot be read.
        """

    def stored_type(self, name: str) -> str:
        """How a tensor is stored, without reading it: ``F32``, ``BF16``, ``Q4_1``; of tensors that
        are joined all their types, ``Q4_0+Q8_0``. ``F32`` where `get` gives other values, or other
        columns, than the file has.

        Raises:
            CheckpointError: a name that is not there.
        """

    def content_hash(self) -> str:
        """`content_hash` below over this checkpoint's files."""


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a checkpoint's tensors with the shapes a model expects.

    Raises:
        CheckpointError: the first tensor that is missing, of another shape, or not expected.
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
            "part of the model that its configuration describes"
        )


def check_shape(
    path: Path, name: str, found: tuple[int, ...] | None, expected: tuple[int, ...]
) -> None:
    """Refuse a tensor that is missing (None) or of another shape than the configuration's.

    Raises:
        CheckpointError: naming it and the shape it should have.
    """
    if found is None:
        raise CheckpointError(f"{path}: tensor {shown(name)} of shape {list(expected)} is missing")
    if found != tuple(expected):
        raise CheckpointError(
            f"{path}: tensor {shown(name)} has shape {list(found)}; "
            f"the configuration asks for {list(expected)}"
        )


def shown(name: str) -> str:
    """A name from a file, fit for a one-line message."""
    return name[:120] if name.isprintable() else repr(name[:120])


def unknown_tensor(path: Path, name: str, names: Iterable[str]) -> CheckpointError:
    """The error for ``get`` of a name that is not in the file."""
    if name == "lm_head.weight":
        return CheckpointError(
            f"{path}: lm_head.weight is tied to the embedding; read model.embed_tokens.weight"
        )
    return CheckpointError(
        f"{path}: no tensor {shown(name)}; {allowed(map(shown, sorted(names)[:8]))}"
    )


def row_range(rows: slice | None, num_rows: int) -> tuple[int, int]:
    """First row and row after the last of ``rows`` (all of them for None), within the tensor."""
    start, stop, step = (rows or slice(None)).indices(num_rows)
    assert step == 1, "rows are read with step 1"
    return start, max(start, stop)


def outer_rows(rows: Rows) -> slice | None:
    """The rows of the first axis."""
    return rows[0] if isinstance(rows, tuple) else rows


def inner_part(values: Tensor, rows: Rows, columns: slice | None) -> Tensor:
    """The rows of the second axis, and the columns, of values whose first axis is cut."""
    if isinstance(rows, tuple):
        values = values[:, rows[1]]
    if columns is not None:
        values = values[..., columns]
    return values.contiguous()


def content_hash(
    headers: Iterable[tuple[int, bytes]],
    tensors: Iterable[tuple[str, int, Callable[[int, int], bytes]]],
) -> str:
    """A stable identity of a checkpoint, 64 hexadecimal digits, fast for files of any size.

    It covers the size of every file, their headers whole (names, shapes, types, metadata), and of
    each tensor's stored bytes all up to 64 KiB, else 16 windows of 4 KiB spread evenly from the
    first byte to the last. A change elsewhere inside a large tensor alone is not seen.

    Args:
        headers: file size in bytes and header bytes, file by file.
        tensors: name, stored bytes, and a function that returns bytes [start, stop) of it.
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
