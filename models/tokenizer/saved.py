"""A tokenizer in a folder of Tilewright's own: the files of `Tokenizer.save` and a mapped file."""

from __future__ import annotations

from pathlib import Path

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.base import TokenizerSource
from tilewright.models.tokenizer.load import read_vocabulary
from tilewright.models.tokenizer.mapped import read_mapped
from tilewright.models.tokenizer.tokenizer import Tokenizer
from tilewright.models.tokenizer.vocabulary import Vocabulary

MAPPED = "tokenizer.bin"


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer into a new or empty ``folder``.

    Raises:
        CheckpointError: the folder is not empty, or cannot be written.
    """
    tokenizer.save(folder)
    try:
        (folder / MAPPED).write_bytes(tokenizer.mapped_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be written: {error.strerror}; allowed: a writable folder"
        ) from None


def read_saved(folder: Path) -> Tokenizer:
    """Return the tokenizer in ``folder``, from the mapped file if there is one.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    return Tokenizer(saved_vocabulary(folder))


def saved_vocabulary(folder: Path) -> Vocabulary:
    """Return the parts of the tokenizer in ``folder``; see `read_saved`."""
    path = folder / MAPPED
    if path.is_file():
        return read_mapped(path, folder)
    return read_vocabulary(TokenizerSource(folder))
