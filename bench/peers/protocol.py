"""What an engine is to a comparison, and the loop of the process that holds one.

JSON lines: the process writes what it loaded, then answers each ``{tokens, num_tokens}`` it reads
with ``{tokens, times}``. While it waits for a line it does nothing. It knows no engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO


@dataclass(frozen=True, slots=True)
class Loaded:
    """Bytes of the weights as held, and what a decode step reads of them (None: not known)."""

    weight_bytes: int
    step_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Generated:
    """A greedy continuation; ``times[i]``: seconds from the call until token ``i`` was known."""

    tokens: tuple[int, ...]
    times: tuple[float, ...]


class Engine(Protocol):
    """A loaded model of batch 1. End tokens do not end a continuation."""

    def loaded(self) -> Loaded:
        """What it holds."""

    def generate(self, tokens: Sequence[int], num_tokens: int) -> Generated:
        """Prefill ``tokens`` into an empty state, then choose ``num_tokens`` greedily."""


def cache_name(source: Path, *parts: str) -> str:
    """What another form of a model's file is called in a cache: by all that it depends on."""
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return f"{source.stem}-{key}"


def serve(open_engine: Callable[[], Engine], requests: TextIO, answers: TextIO) -> int:
    """Open an engine and answer until ``requests`` ends; returns the exit code.

    What an engine raises becomes ``{error}``: one line for the table of results.
    """

    def answer(values: dict[str, Any]) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        engine = open_engine()
        answer(dataclasses.asdict(engine.loaded()))
        for line in requests:
            asked = json.loads(line)
            answer(dataclasses.asdict(engine.generate(asked["tokens"], asked["num_tokens"])))
    except Exception as error:
        kind = type(error).__name__
        answer({"error": " ".join(f"{kind}: {error}".split())})
        return 1
    return 0


def take_standard_output() -> TextIO:
    """Standard output for answers alone: what libraries print goes to standard error instead."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers
