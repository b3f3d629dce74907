"""Sizes for load test scenarios."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tilewright.options.arguments import integer, option, real


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Sizes for a load test. A scenario ignores fields that do not concern it."""

    requests: int = option("requests in total", default=32, type=integer(1, 1 << 20))
    concurrency: int = option("concurrent users", default=1, type=integer(1, 4096))
    rate: float = option(
        "requests per second with Poisson arrivals, 0: by --concurrency",
        default=0.0,
        type=real(0, 1e6),
    )
    input_tokens: int = option("tokens per prompt", default=128, type=integer(1, 1 << 20))
    output_tokens: int = option("tokens per answer", default=128, type=integer(1, 1 << 20))
    long_tokens: int = option(
        "tokens in an intruder's prompt, or in the chats' system prompt",
        default=1024,
        type=integer(1, 1 << 20),
    )
    turns: int = option("turns per chat", default=8, type=integer(1, 1000))
    levels: tuple[int, ...] = option(
        "contest: user counts, from those of the scenario (default: all)",
        default=(),
        type=integer(1, 4096),
    )
    flush: bool = option(
        "contest: empty the prefix cache before every level. chat: repeat the last prompts with an "
        "empty cache. Needs a server with --admin",
        default=False,
    )
    drawn_lengths: bool = option(
        "contest: answers of random lengths, for models with random weights",
        default=False,
    )
    seed: int = option("seed for prompts and arrivals", default=0, type=integer(0, 1 << 31))
    vocabulary: int = option("limit of prompt token ids", default=256, type=integer(2, 1 << 31))

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
