"""Sizes for load test scenarios."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Sizes for a load test. A scenario ignores fields that do not concern it.

    Attributes:
        requests: Total request count.
        concurrency: Concurrent users.
        rate: Arriving requests per second. 0: a user sends the next request after a response.
        input_tokens: Tokens in a prompt.
        output_tokens: Tokens in an output.
        long_tokens: Tokens in the intruder's prompt.
        turns: Turns in a chat.
        vocabulary: Exclusive upper limit for prompt token ids.
        levels: Concurrencies in a contest. Empty: all.
        flush: Clear the prefix cache before every level of a contest, or before chats repeat their
            last prompts.
        drawn_lengths: Random output lengths in a contest, also for servers without random weights.
        settle_seconds: Time that streams run before the intruder starts.
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
        """Return a completion request with random tokens that ignores end tokens."""
        count = num_input or self.input_tokens
        return {
            "prompt": [chooser.randrange(self.vocabulary) for _ in range(count)],
            "max_tokens": num_output or self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }

    def words(self, chooser: random.Random, count: int) -> str:
        """Return ``count`` short words, each about a token in most vocabularies."""
        return " ".join(chooser.choice(_WORDS) for _ in range(count))


_WORDS = ("a", "be", "see", "the", "of", "sun", "we", "go", "it", "red", "up", "no", "day", "old")
