"""The load of an inference contest: equal prompts at seven weighted levels of users."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from tilewright.evaluate.load.client import CHAT, Client, at_most, flush
from tilewright.evaluate.load.figures import Figures
from tilewright.evaluate.load.shape import LoadConfig

LEVELS = {1: 1, 2: 1, 4: 2, 8: 2, 16: 4, 32: 4, 64: 8}
"""Users at a time, and the weight of that level's rate in the score."""
_NUM_TASKS, _NUM_PROMPTS, _MEAN_LENGTH = 64, 62, 320.0
_SUMS = ("What is 17 + 25? Answer with the number.", "What is 8 * 12? Answer with the number.")


async def contest(client: Client, shape: LoadConfig) -> AsyncIterator[Figures]:
    """Send two warm-up requests, then 64 whole chats per level. A semaphore limits users.

    Prompts have ``input_tokens`` words and outputs have up to ``output_tokens`` tokens. Outputs of
    random weights have no end. Their lengths are drawn from the seed and the level, exponentially
    with a mean of 320, and are equal for all tokenizers. ``drawn_lengths`` selects the same lengths
    if the server does not declare random weights.

    Raises:
        TilewrightError: The server does not clear its prefix cache.
    """
    words = random.Random(shape.seed)
    prompts = [shape.words(words, shape.input_tokens) for _ in range(_NUM_PROMPTS)]
    models = await client.fetch("/v1/models")
    weights = models["data"][0].get("meta", {}).get("weights")
    is_random = shape.drawn_lengths or weights == "random"
    rows: list[Figures] = []
    for level in shape.levels or LEVELS:
        chooser = random.Random(f"{shape.seed} {level}")
        bodies = [_body(shape, text, 1.0, chooser, is_random) for text in prompts]
        for text in _SUMS:
            body = _body(shape, text, 0.0, chooser, is_random)
            bodies.insert(chooser.randrange(len(bodies) + 1), body)
        jobs = [partial(client.whole, CHAT, body) for body in bodies]
        assert len(jobs) == _NUM_TASKS
        if shape.flush:
            await flush(client)
        await at_most(1, jobs[:2])
        heard, seconds = await at_most(level, jobs)
        good = [each for each in heard if not each.error]
        total = sum(each.num_prompt + each.count for each in good)
        row: Figures = {
            "users": level,
            "weight": LEVELS[level],
            "tokens_per_second": total / seconds,
            "output_tokens_per_second": sum(each.count for each in good) / seconds,
            "failed": len(heard) - len(good),
        }
        if errors := [each.error for each in heard if each.error]:
            row["why"] = errors[0]
        rows.append(row)
        yield row
    total_row: Figures = {"lengths": "drawn" if is_random else "the model's"}
    if len(rows) == len(LEVELS):
        rates = (float(row["weight"]) * float(row["tokens_per_second"]) for row in rows)
        total_row["weighted_sum"] = sum(rates)
    yield total_row


def _body(
    shape: LoadConfig, text: str, temperature: float, chooser: random.Random, is_random: bool
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": shape.output_tokens,
        "temperature": temperature,
    }
    if is_random:
        drawn = int(chooser.expovariate(1 / _MEAN_LENGTH)) + 1
        body |= {"max_tokens": min(shape.output_tokens, drawn), "ignore_eos": True}
    return body
