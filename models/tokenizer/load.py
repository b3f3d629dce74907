"""The tokenizer of a checkpoint, from whichever kind of file its vocabulary stands in."""

from __future__ import annotations

from pathlib import Path

from tilewright.models.checkpoints.base import TokenizerSource
from tilewright.models.tokenizer.mapped import read_mapped
from tilewright.models.tokenizer.tokenizer import Tokenizer
from tilewright.models.tokenizer.vocabulary import Vocabulary, read_folder
from tilewright.models.tokenizer.vocabulary_dllama import read_tokenizer
from tilewright.models.tokenizer.vocabulary_gguf import read_metadata


def load_tokenizer(source: TokenizerSource) -> Tokenizer:
    """The tokenizer of a checkpoint, from its ``tokenizer_source``.

    Raises:
        CheckpointError: files or metadata that are missing, corrupt or of a kind not read.
    """
    return Tokenizer(read_vocabulary(source))


def load_mapped(path: Path, where: Path) -> Tokenizer:
    """Return the tokenizer from a file of `Tokenizer.mapped_bytes`. Messages name ``where``.

    Raises:
        CheckpointError: The file is damaged or has another format.
    """
    return Tokenizer(read_mapped(path, where))


def read_vocabulary(source: TokenizerSource) -> Vocabulary:
    """The parts of a checkpoint's tokenizer, of which `load_tokenizer` makes one.

    Raises:
        CheckpointError: files or metadata that are missing, corrupt or of a kind not read.
    """
    if source.metadata is not None:
        return read_metadata(source.metadata, source.path)
    if source.path.suffix == ".t" and not source.path.is_dir():
        return read_tokenizer(source.path)
    return read_folder(source.path)
