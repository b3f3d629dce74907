"""Prompts of the named cases and of users: where they lie, and reading them strictly.

The samples and the texts are found the same way in a clone and in an installed wheel. Knows nothing
of tokenizers; where lengths matter it works on token ids it is handed.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from tilewright.compiler.bench.cases import ACCURACY_TEXT
from tilewright.compiler.errors import ConfigError, allowed
from tilewright.compiler.files import open_regular

MAX_FILE_BYTES = 16 * 2**20
MAX_TEXT_BYTES = 2**20
"""Of a user's text for accuracy: a thousand times what is read of it at the least."""
_KEYS = ("prompt", "max_tokens")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one user asks; `max_tokens` bounds the answer where the file says so."""

    text: str
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class AccuracyText:
    """A text that accuracy is measured on; ``name`` stands in the record."""

    name: str
    content: str

    @property
    def is_standard(self) -> bool:
        """Whether tables are of this text."""
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
    place = f"accuracy text {name_or_path[:200]!r}"
    try:
        with open_regular(Path(name_or_path)) as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(
            f"{place}: {reason}; {allowed(sorted(files))}, or the path of a UTF-8 text file"
        ) from None
    if len(data) > MAX_TEXT_BYTES:
        raise ConfigError(f"{place} is too large; allowed: {MAX_TEXT_BYTES} bytes or fewer")
    try:
        content = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{place} is not valid UTF-8 at byte {error.start}; allowed: UTF-8 text"
        ) from None
    stem = re.sub(r"[^\w.-]+", "-", Path(name_or_path).stem)[:40]
    return AccuracyText(f"{stem}-{hashlib.sha256(data).hexdigest()[:8]}", content)


def sample_prompts_dir() -> Path:
    """The folder of the sample prompts.

    A wheel puts `demo/sample_prompts` beside `compiler`, as a clone does. It is not looked up as
    the package `demo.sample_prompts`, because any other `demo` on the path would hide it.
    """
    return Path(__file__).resolve().parents[2] / "demo" / "sample_prompts"


def sample_prompts(name: str) -> list[Prompt]:
    """The prompts of one sample file, such as `questions.json`.

    Raises:
        ConfigError: when there is no such sample, listing those there are.
    """
    names = sorted(path.name for path in sample_prompts_dir().glob("*.json"))
    if name not in names:
        raise ConfigError(f"unknown sample prompts {name!r}; {allowed(names, name)}")
    return read_prompts(sample_prompts_dir() / name)


def bench_text(name: str) -> str:
    """The text `name` of `compiler/bench/texts`, such as `accuracy.txt`.

    Raises:
        ConfigError: when there is no such text, listing those there are.
    """
    texts = _bench_texts()
    if name not in texts:
        raise ConfigError(f"unknown text {name!r}; {allowed(sorted(texts), name)}")
    return texts[name].read_text(encoding="utf-8")


def _bench_texts() -> dict[str, Traversable]:
    folder = resources.files("tilewright.compiler.bench") / "texts"
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


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a JSON list of objects with `prompt` and, at will, `max_tokens`.

    Raises:
        ConfigError: when the file is missing, over `MAX_FILE_BYTES`, no UTF-8, no JSON, or has an
            entry of another shape; the message names the file and the entry.
    """
    path = Path(path)
    entries = _parse(path, _read_text(path))
    if not isinstance(entries, list) or not entries:
        found = "an empty list" if entries == [] else type(entries).__name__
        raise ConfigError(f"prompts file {str(path)!r} holds {found}; allowed: a list of objects")
    return [
        _prompt(entry, f"prompts file {str(path)!r}, entry {i}") for i, entry in enumerate(entries)
    ]


def _read_text(path: Path) -> str:
    name = f"prompts file {str(path)!r}"
    try:
        if not path.is_file():
            problem = "is not a file" if path.exists() else "does not exist"
            raise ConfigError(f"{name} {problem}; allowed: a JSON file of prompts")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{name} is too large; allowed: {MAX_FILE_BYTES} bytes or fewer")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not valid UTF-8 at byte {error.start}") from None


def _parse(path: Path, text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(
            f"prompts file {str(path)!r} is not valid JSON at {place}: {error.msg}"
        ) from None
    except (RecursionError, ValueError):
        raise ConfigError(
            f"prompts file {str(path)!r} is not valid JSON: nested too deep or a number too long"
        ) from None


def _prompt(entry: object, place: str) -> Prompt:
    if not isinstance(entry, dict):
        raise ConfigError(f"{place} is {type(entry).__name__}; allowed: an object")
    unknown = [key for key in entry if key not in _KEYS]
    if unknown:
        raise ConfigError(
            f"{place}: unknown key {reprlib.repr(unknown[0])}; {allowed(_KEYS, unknown[0])}"
        )
    text = entry.get("prompt")
    if not isinstance(text, str):
        found = type(text).__name__ if "prompt" in entry else "missing"
        raise ConfigError(f"{place}: prompt is {found}; allowed: a string")
    if not text.strip():
        raise ConfigError(f"{place}: prompt is empty; allowed: a string with text")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ConfigError(f"{place}: prompt holds half a surrogate pair; allowed: valid Unicode")
    max_tokens = entry.get("max_tokens")
    if "max_tokens" in entry and (type(max_tokens) is not int or max_tokens < 1):
        raise ConfigError(
            f"{place}: max_tokens {reprlib.repr(max_tokens)}; allowed: an integer of 1 or more"
        )
    return Prompt(text, max_tokens)
