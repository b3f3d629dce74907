"""Prompts of benchmark cases and of users: location and strict reading.

A clone and an installed wheel have the same locations. Excludes tokenizers; functions with lengths
use token ids.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import msgspec

from tilewright.errors import ConfigError, allowed, one_line
from tilewright.evaluate.cases.cases import ACCURACY_TEXT
from tilewright.utils.files import read_text

MAX_FILE_BYTES = 16 * 2**20
MAX_TEXT_BYTES = 2**20
"""Maximum size of a user's accuracy text in bytes."""


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt of one user.

    Attributes:
        max_tokens: Maximum output tokens. None: not limited by the file.
    """

    text: str
    max_tokens: int | None = None


class _PromptFileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt in a file. ``max_tokens`` 0: no limit."""

    prompt: Annotated[str, msgspec.Meta(pattern=r"\S")]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 0


_ENTRIES: msgspec.json.Decoder[list[_PromptFileEntry]] = msgspec.json.Decoder(
    Annotated[list[_PromptFileEntry], msgspec.Meta(min_length=1)]  # type: ignore[arg-type]
)
_ENTRIES_FORM = "a list of objects with prompt, some text, and at will max_tokens, 1 or more"


@dataclass(frozen=True, slots=True)
class AccuracyText:
    """A text for accuracy. ``name`` is part of records."""

    name: str
    content: str

    @property
    def is_standard(self) -> bool:
        """Whether this is the text for the tables in PERF.md."""
        return self.name == ACCURACY_TEXT


def accuracy_text(name_or_path: str = ACCURACY_TEXT) -> AccuracyText:
    """Return an included text by name (``-`` equals ``_``), or a user's file.

    A file's name in records is its stem and the start of its SHA-256. Therefore a file never
    has the name of an included text or of its earlier contents.

    Raises:
        ConfigError: The name is unknown, or the file is not regular, too large or not UTF-8.
    """
    files = {Path(name).stem.replace("_", "-"): name for name in _bench_texts()}
    name = name_or_path.replace("_", "-")
    if name in files:
        return AccuracyText(name, bench_text(files[name]))
    hint = f"{', '.join(sorted(files))}, or the path of a UTF-8 text file"
    where = f"accuracy text {name_or_path[:200]!r}"
    content = read_text(Path(name_or_path), where, hint=hint, limit=MAX_TEXT_BYTES)
    stem = re.sub(r"[^\w.-]+", "-", Path(name_or_path).stem)[:40]
    digest = hashlib.sha256(content.encode()).hexdigest()
    return AccuracyText(f"{stem}-{digest[:8]}", content)


def sample_prompts_dir() -> Path:
    """Return the sample prompts' directory.

    The path is relative to this package in a wheel and in a clone. The package
    `demo.sample_prompts` is not used, because a different `demo` package could hide it.
    """
    return Path(__file__).parents[2] / "sample_prompts"


def sample_prompts(name: str) -> list[BenchPrompt]:
    """Return the prompts in a sample file, for example `questions.json`.

    Raises:
        ConfigError: The sample is unknown. Lists all samples.
    """
    names = sorted(path.name for path in sample_prompts_dir().glob("*.json"))
    if name not in names:
        raise ConfigError(f"unknown sample prompts {name!r}; {allowed(names, name)}")
    return read_prompts(sample_prompts_dir() / name)


def bench_text(name: str) -> str:
    """Return a text in `tilewright/evaluate/cases/texts`, for example `accuracy.txt`.

    Raises:
        ConfigError: The text is unknown. Lists all texts.
    """
    texts = _bench_texts()
    if name not in texts:
        raise ConfigError(f"unknown text {name!r}; {allowed(sorted(texts), name)}")
    return texts[name].read_text(encoding="utf-8")


def _bench_texts() -> dict[str, Traversable]:
    folder = resources.files("tilewright.evaluate.cases") / "texts"
    return {entry.name: entry for entry in folder.iterdir() if entry.name.endswith(".txt")}


def cut_prompts(tokens: Sequence[int], *, num_prompts: int, prompt_length: int) -> list[list[int]]:
    """Cut prompts of exactly `prompt_length` ids from a text, which repeats.

    Prompts start at equal distances, so that users of a batch differ.
    """
    assert tokens and num_prompts >= 1 and prompt_length >= 1
    starts = [index * len(tokens) // num_prompts for index in range(num_prompts)]
    return [
        [tokens[(start + offset) % len(tokens)] for offset in range(prompt_length)]
        for start in starts
    ]


def read_prompts(path: str | Path) -> list[BenchPrompt]:
    """Read a JSON list of objects with `prompt` and optional `max_tokens`.

    Raises:
        ConfigError: The file is missing, larger than `MAX_FILE_BYTES`, not UTF-8 or not JSON, or an
            entry is invalid. Names the file and the entry.
    """
    place = f"prompts file {str(path)!r}"
    text = read_text(Path(path), place, hint="a JSON file of prompts", limit=MAX_FILE_BYTES)
    try:
        entries = _ENTRIES.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{place}: {one_line(error)}; allowed: {_ENTRIES_FORM}") from None
    return [BenchPrompt(entry.prompt, entry.max_tokens or None) for entry in entries]
