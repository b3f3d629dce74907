"""Loads a checkpoint's tokenizer from any supported vocabulary file."""

from __future__ import annotations

from pathlib import Path

from tilewright.models.checkpoints.base import TokenizerSource
from tilewright.models.tokenizer.mapped import read_mapped
from tilewright.models.tokenizer.tokenizer import Tokenizer
from tilewright.models.tokenizer.vocabulary import Vocabulary, read_folder
from tilewright.models.tokenizer.vocabulary_dllama import read_tokenizer
from tilewright.models.tokenizer.vocabulary_gguf import read_metadata


def load_tokenizer(source: TokenizerSource) -> Tokenizer:
    """Return a checkpoint's tokenizer from its ``tokenizer_source``.

    Raises:
        CheckpointError: Files or metadata are missing, corrupt or not supported.
    """
    return Tokenizer(read_vocabulary(source))


def load_mapped(path: Path, where: Path) -> Tokenizer:
    """Return the tokenizer from a file of `Tokenizer.mapped_bytes`. Messages name ``where``.

    Raises:
        CheckpointError: The file is damaged or has another format.
    """
    return Tokenizer(read_mapped(path, where))


def read_vocabulary(source: TokenizerSource) -> Vocabulary:
    """Return the vocabulary for `load_tokenizer`.

    Raises:
        CheckpointError: Files or metadata are missing, corrupt or not supported.
    """
    if source.metadata is not None:
        return read_metadata(source.metadata, source.path)
    if source.path.suffix == ".t" and not source.path.is_dir():
        return read_tokenizer(source.path)
    return read_folder(source.path)
