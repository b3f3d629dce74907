"""A model's files, listed by name. Opens no weights."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.huggingface.shards import INDEX, find_shards
from tilewright.models.checkpoints.quantized.config import SIDE_FILES

_NAMED = (
    "config.json",
    *SIDE_FILES,
    INDEX,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)
_SPLIT = re.compile(r"(.+)-\d{5}-of-\d{5}\.gguf", re.IGNORECASE)


def model_files(path: Path) -> tuple[Path, ...]:
    """Return the model's files at ``path``, tokenizer included, as `find_model` returns it.

    Extra files are harmless. The result is empty if there are no weights.
    """
    if path.is_dir():
        try:
            shards, _ = find_shards(path)
        except CheckpointError:
            return ()
        return tuple(path / name for name in (*_NAMED, *shards) if (path / name).is_file())
    if path.suffix.lower() == ".m":
        return (path, *sorted(path.parent.glob("*.t")))
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return (path,)
    return tuple(sorted(path.parent.glob(f"{glob.escape(split[1])}-*-of-*.gguf")))
