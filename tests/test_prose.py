"""The prose of every file is within budget, but for the listed files. The list only shrinks."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from tests.prose import SUFFIXES, measure, measure_texts

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = ROOT / "tests" / "prose_allowed.txt"


def test_prose_files_over_budget_are_the_listed_files() -> None:
    listed = set(ALLOWED.read_text("utf-8").split())
    patterns = [f"*{suffix}" for suffix in SUFFIXES]
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:  # an unpacked archive has no history
        return
    paths = [path for path in done.stdout.split("\n") if path and "goldens" not in path]
    paths = [path for path in paths if (ROOT / path).exists()]  # others are deleted
    over = {path for path in paths if measure(ROOT / path).excess()}
    assert over - listed == set(), "over budget: see python tests/prose.py FILE"
    assert listed - over == set(), f"within budget now: remove from {ALLOWED.name}"


def test_prose_measures_count_words_and_sentences() -> None:
    prose = measure_texts(["The page that it holds. See `code`; one thing.", "| a table |"])
    assert prose.num_words == 9
    assert prose.values["relative"] == 100 / 9
    assert prose.values["vague"] == 300 / 9
    assert prose.values["house"] == 100 / 9
    assert prose.values["joins"] == 0.5
    assert prose.values["longest"] == 5


def test_prose_short_files_have_limits_for_rates_and_the_longest_sentence() -> None:
    short = measure_texts(["which that what who one it such"])
    assert set(short.excess()) == {"relative"}
    assert not replace(short, is_test=True).excess()
    assert not measure_texts(["which that one it such"]).excess()
    assert set(measure_texts(["word " * 36]).excess()) == {"longest"}
