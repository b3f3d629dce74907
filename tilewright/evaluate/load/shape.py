"""The sizes that plans of load are made by."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How much a load test asks for; each plan reads what concerns it.

    Attributes:
        requests: in all.
        concurrency: users at a time.
        rate: requests that arrive a second; 0: users ask again when they are answered.
        input_tokens: of each prompt; ``long_tokens`` of the intruder's.
        output_tokens: of each answer.
        turns: of each chat.
        vocabulary: ids of prompts are below it.
        levels: of a contest, users at a time; none: all that there are.
        flush: a contest's server forgets its prefix cache before every level, and that of chats
            before their last prompts are asked once more.
        drawn_lengths: of a contest's answers, also where the server's weights are not random.
        settle_seconds: how long streams run before the intruder comes.
    """

    requests: int = 32
    concurrency: int = 1
    rate: float = 0.0
    input_tokens: int = 128
    output_tokens: int = 128
    long_tokens: int = 1024
    turns: int = 8
    seed: int = 0
    vocabulary: int = 256
    levels: tuple[int, ...] = ()
    flush: bool = False
    drawn_lengths: bool = False
    settle_seconds: float = 1.0

    def body(
        self, chooser: random.Random, *, num_input: int | None = None, num_output: int | None = None
    ) -> dict[str, Any]:
        """A completion of random tokens that no end token ends."""
        count = num_input or self.input_tokens
        return {
            "prompt": [chooser.randrange(self.vocabulary) for _ in range(count)],
            "max_tokens": num_output or self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }

    def words(self, chooser: random.Random, count: int) -> str:
        """Make so many words of a letter or two: about a token each in most vocabularies."""
        return " ".join(chooser.choice(_WORDS) for _ in range(count))


_WORDS = ("a", "be", "see", "the", "of", "sun", "we", "go", "it", "red", "up", "no", "day", "old")
