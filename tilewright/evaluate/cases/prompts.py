"""Prompts of the named cases and of users: where they lie, and reading them strictly.

The samples and the texts are found the same way in a clone and in an installed wheel. Knows nothing
of tokenizers; where lengths matter it works on token ids it is handed.
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
from tilewright.utils.files import open_regular

MAX_FILE_BYTES = 16 * 2**20
MAX_TEXT_BYTES = 2**20
"""The most bytes of a user's text for accuracy: a thousand times what is read of it at least."""


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """What one user asks; `max_tokens` bounds the answer where the file says so."""

    text: str
    max_tokens: int | None = None


class _PromptFileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt as a file has it; 0 stands for a bound that is not given."""

    prompt: Annotated[str, msgspec.Meta(pattern=r"\S")]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 0


_ENTRIES: msgspec.json.Decoder[list[_PromptFileEntry]] = msgspec.json.Decoder(
    Annotated[list[_PromptFileEntry], msgspec.Meta(min_length=1)]  # type: ignore[arg-type]
)
_ENTRIES_FORM = "a list of objects with prompt, some text, and at will max_tokens, 1 or more"


@dataclass(frozen=True, slots=True)
class AccuracyText:
    """A text that accuracy is measured on; ``name`` stands in the record."""

    name: str
    content: str

    @property
    def is_standard(self) -> bool:
        """Whether this is the text that the tables of PERF.md are measured on."""
        return self.name == ACCURACY_TEXT


def accuracy_text(name_or_path: str = ACCURACY_TEXT) -> AccuracyText:
    """A text of ours by name (``-`` and ``_`` alike), else a user's file.

    A file's name in records is its stem and the start of its SHA-256, so that no file passes for
    a text of ours, nor for what it was before it was changed.

    Raises:
        ConfigError: for neither, and for what is no regular file, too large, or no UTF-8.
    """
    files = {Path(name).stem.replace("_", "-"): name for name in _bench_texts()}
    name = name_or_path.replace("_", "-")
    if name in files:
        return AccuracyText(name, bench_text(files[name]))
    content = _read_text(
        Path(name_or_path),
        f"accuracy text {name_or_path[:200]!r}",
        limit=MAX_TEXT_BYTES,
        options=f"{allowed(sorted(files))}, or the path of a UTF-8 text file",
    )
    stem = re.sub(r"[^\w.-]+", "-", Path(name_or_path).stem)[:40]
    digest = hashlib.sha256(content.encode()).hexdigest()
    return AccuracyText(f"{stem}-{digest[:8]}", content)


def sample_prompts_dir() -> Path:
    """The folder of the sample prompts.

    A wheel puts `demo/sample_prompts` beside `compiler`, as a clone does. It is not looked up as
    the package `demo.sample_prompts`, because any other `demo` on the path would hide it.
    """
    return Path(__file__).parents[2] / "sample_prompts"


def sample_prompts(name: str) -> list[BenchPrompt]:
    """The prompts of one sample file, such as `questions.json`.

    Raises:
        ConfigError: when there is no such sample, listing those there are.
    """
    names = sorted(path.name for path in sample_prompts_dir().glob("*.json"))
    if name not in names:
        raise ConfigError(f"unknown sample prompts {name!r}; {allowed(names, name)}")
    return read_prompts(sample_prompts_dir() / name)


def bench_text(name: str) -> str:
    """The text `name` of `tilewright/evaluate/cases/texts`, such as `accuracy.txt`.

    Raises:
        ConfigError: when there is no such text, listing those there are.
    """
    texts = _bench_texts()
    if name not in texts:
        raise ConfigError(f"unknown text {name!r}; {allowed(sorted(texts), name)}")
    return texts[name].read_text(encoding="utf-8")


def _bench_texts() -> dict[str, Traversable]:
    folder = resources.files("tilewright.evaluate.cases") / "texts"
    return {entry.name: entry for entry in folder.iterdir() if entry.name.endswith(".txt")}


def cut_prompts(tokens: Sequence[int], *, num_prompts: int, prompt_length: int) -> list[list[int]]:
    """Cut prompts of exactly `prompt_length` ids from a text's ids, which repeat without end.

    The prompts start at equal distances, so that users of one batch differ.
    """
    assert tokens and num_prompts >= 1 and prompt_length >= 1
    starts = [index * len(tokens) // num_prompts for index in range(num_prompts)]
    return [
        [tokens[(start + offset) % len(tokens)] for offset in range(prompt_length)]
        for start in starts
    ]


def read_prompts(path: str | Path) -> list[BenchPrompt]:
    """Read a JSON list of objects with `prompt` and, at will, `max_tokens`.

    Raises:
        ConfigError: when the file is missing, over `MAX_FILE_BYTES`, no UTF-8, no JSON, or has an
            entry of another shape; the message names the file and the entry.
    """
    place = f"prompts file {str(path)!r}"
    options = "allowed: a JSON file of prompts"
    text = _read_text(Path(path), place, limit=MAX_FILE_BYTES, options=options)
    try:
        entries = _ENTRIES.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{place}: {one_line(error)}; allowed: {_ENTRIES_FORM}") from None
    return [BenchPrompt(entry.prompt, entry.max_tokens or None) for entry in entries]


def _read_text(path: Path, place: str, *, limit: int, options: str) -> str:
    """A file of so many bytes of UTF-8 at most; ``options``: what is allowed where there is none.

    Raises:
        ConfigError: beginning with ``place``.
    """
    try:
        with open_regular(path) as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"{place}: {reason}; {options}") from None
    if len(data) > limit:
        raise ConfigError(f"{place} is too large; allowed: {limit} bytes or fewer")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{place} is not valid UTF-8 at byte {error.start}; allowed: UTF-8 text"
        ) from None
