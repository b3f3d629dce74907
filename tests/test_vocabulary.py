"""Words that the project replaces: their number of uses may only fall. Class names are unique.

Each line in ``tests/vocabulary.txt`` has a word and its uses. A capitalized word is a replaced
class name. Identifiers are split at underscores and capitals. Phrases in `ALLOWED` do not count.
Words with the count 0 are also forbidden in C++, CUDA and page sources.
``TILEWRIGHT_UPDATE_GOLDENS=1`` writes lower numbers, never higher ones. Ranges are small, medium
and large.
"""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COUNTS = ROOT / "tests" / "vocabulary.txt"
ROOMS = ("compiler", "models", "tilewright", "bench", "demo")
CPP_SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".inl")
OTHER_SUFFIXES = (*CPP_SUFFIXES, ".js", ".css", ".html")
FAMILIES = {
    "models/architectures/": "modules have the names of torch and of the published models",
    "compiler/targets/cuda/engine_generator/parts/": "text of a standalone file, in its own words",
    "bench/": "each command has its Options",
}
"""Directories with class names of other modules, each with its reason."""
ALLOWED = {
    'tag="asked"': "tag of records in sweep journals, which keep their names",
    "--max-seats": "hidden alias of an old flag",
    "held-out": "text without influence on a search or a fit, as in machine learning",
    "held_out": "the same, in identifiers",
    "WIDE_CHARS_MODE": "attribute of the library tabulate",
    '"dealt"': "key of records in compiled folders, which keep their names",
}
"""Legitimate uses of replaced words, each with its reason."""
RANGES = {"few", "many", "wide"}
"""Parts of no identifier. As single words they are legitimate."""
_ALLOWED = re.compile("|".join(map(re.escape, ALLOWED)))
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def word_counts(*suffixes: str) -> Counter[str]:
    """Return the uses of every word in identifiers, strings and comments."""
    counts: Counter[str] = Counter()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*"):  # does not follow the links of the package
            if path.suffix in suffixes and path.is_file():
                text = _ALLOWED.sub("", path.read_text("utf-8"))
                counts.update(part.lower() for part in _PART.findall(text))
    return counts


def allowed_counts() -> dict[str, int]:
    """Return the limit for each word in the list."""
    return {word: int(n) for word, n in map(str.split, COUNTS.read_text("utf-8").splitlines())}


def test_vocabulary_replaced_words_only_fall() -> None:
    listed = allowed_counts()
    counts = word_counts(".py")
    more = {word: (counts[word], n) for word, n in listed.items() if counts[word] > n}
    assert not more, f"more uses than {COUNTS.name} allows (uses, allowed): {more}"
    if os.environ.get("TILEWRIGHT_UPDATE_GOLDENS"):
        COUNTS.write_text("".join(f"{word} {counts[word]}\n" for word in listed), "utf-8")


def test_vocabulary_other_sources_have_no_removed_words() -> None:
    listed = allowed_counts()
    counts = word_counts(*OTHER_SUFFIXES)
    assert not {word: counts[word] for word, n in listed.items() if n == 0 and counts[word]}


def range_names(path: Path) -> set[str]:
    """Return identifiers for ranges in a source, except in strings of Python."""
    text = path.read_text("utf-8")
    names = {path.stem, *re.findall(r"\w+", text)} - set(ALLOWED)
    parts = {name: [part.lower() for part in _PART.findall(name)] for name in names}
    found = {name for name in names if len(parts[name]) > 1 and RANGES.intersection(parts[name])}
    if found and path.suffix == ".py":
        fields = ("id", "attr", "arg", "name", "asname")
        nodes = list(ast.walk(ast.parse(text)))
        used = {str(getattr(node, field, "")) for node in nodes for field in fields}
        found &= {path.stem, *".".join(used).split(".")}
    return found


def test_vocabulary_ranges_are_small_medium_and_large() -> None:
    found = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*"):
            if path.suffix in (".py", *CPP_SUFFIXES) and (names := range_names(path)):
                found[path.relative_to(ROOT).as_posix()] = names
    assert not found


def test_vocabulary_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(tuple(FAMILIES)):
                for node in ast.parse(path.read_text("utf-8")).body:
                    if isinstance(node, ast.ClassDef):
                        places.setdefault(node.name.lstrip("_"), []).append(name)
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not {name: places[name] for name in allowed_counts() if name in places}


def test_vocabulary_identifiers_are_split() -> None:
    parts = [part.lower() for part in _PART.findall("BlockScale held_weight HTTPServer num_K")]
    assert parts == ["block", "scale", "held", "weight", "http", "server", "num", "k"]
