"""Words that the project replaces: their number of uses may only fall.

``tests/vocabulary.txt`` has a word and its number of uses in each line. Identifiers are split at
underscores and capitals. The phrases of `ALLOWED` do not count. ``TILEWRIGHT_UPDATE_GOLDENS=1``
writes lower numbers, never higher ones.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COUNTS = ROOT / "tests" / "vocabulary.txt"
ROOMS = ("compiler", "models", "tilewright", "bench", "demo")
ALLOWED = {
    'tag="asked"': "tag of records in sweep journals, which keep their names",
    "held-out": "text without influence on a search or a fit, as in machine learning",
    "held_out": "the same, in identifiers",
    '"dealt"': "key of records in compiled folders, which keep their names",
}
"""Legitimate uses of replaced words, each with its reason."""
_ALLOWED = re.compile("|".join(map(re.escape, ALLOWED)))
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def word_counts() -> Counter[str]:
    """Return the uses of every word in identifiers, strings and comments of the Python files."""
    counts: Counter[str] = Counter()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):  # does not follow the links of the package
            text = _ALLOWED.sub("", path.read_text("utf-8"))
            counts.update(part.lower() for part in _PART.findall(text))
    return counts


def test_vocabulary_replaced_words_only_fall() -> None:
    listed = {word: int(n) for word, n in map(str.split, COUNTS.read_text("utf-8").splitlines())}
    counts = word_counts()
    more = {word: (counts[word], n) for word, n in listed.items() if counts[word] > n}
    assert not more, f"more uses than {COUNTS.name} allows (uses, allowed): {more}"
    if os.environ.get("TILEWRIGHT_UPDATE_GOLDENS"):
        COUNTS.write_text("".join(f"{word} {counts[word]}\n" for word in listed), "utf-8")


def test_vocabulary_identifiers_are_split() -> None:
    parts = [part.lower() for part in _PART.findall("BlockScale held_weight HTTPServer num_K")]
    assert parts == ["block", "scale", "held", "weight", "http", "server", "num", "k"]
