"""Load test with multi-turn chats: share of the prompt tokens in the prefix cache."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import AsyncIterator
from typing import Any

from tilewright.evaluate.load.client import CHAT, Client, ResponseTiming, flush
from tilewright.evaluate.load.figures import Figures, times
from tilewright.evaluate.load.shape import LoadConfig


async def chats(client: Client, shape: LoadConfig) -> AsyncIterator[Figures]:
    """Run a chat for each user. All chats share a system prompt with ``long_tokens`` words.

    The shareable part of a prompt is its longest common prefix with an earlier prompt. Hits beyond
    it, for example in earlier answers, count only in the share of all prompts. With ``flush``, the
    last prompts run again with an empty cache, as a comparison for the time to first token.
    """
    system = shape.words(random.Random(shape.seed), shape.long_tokens)
    seen: list[list[int]] = []
    turns: list[list[ResponseTiming]] = [[] for _ in range(shape.turns)]
    possible, shared, cached, num_prompt_tokens = 0, 0, 0, 0
    histories = [[{"role": "system", "content": system}] for _ in range(shape.concurrency)]
    choosers = [random.Random(shape.seed + 1 + user) for user in range(shape.concurrency)]
    body, bodies = {"max_tokens": shape.output_tokens, "temperature": 0}, list[dict[str, Any]]()
    if shape.flush:
        await flush(client)
    for turn in range(shape.turns):
        for history, chooser in zip(histories, choosers, strict=True):
            words = shape.words(chooser, shape.input_tokens)
            history.append({"role": "user", "content": words})
        prompts = await asyncio.gather(*(_tokens(client, history) for history in histories))
        bodies = [{"messages": list(each), **body} for each in histories]
        heard = await asyncio.gather(*(client.stream(CHAT, each) for each in bodies))
        if failed := [each.error for each in heard if each.error]:
            yield {"failed": len(failed), "why": failed[0]}
            return
        for history, prompt, each in zip(histories, prompts, heard, strict=True):
            most = max((_common(prompt, old) for old in seen), default=0)
            possible += most
            shared += min(most, each.num_cached)
            cached += each.num_cached
            num_prompt_tokens += each.num_prompt
            seen.append(prompt)
            history.append({"role": "assistant", "content": each.text})
        turns[turn] = list(heard)
    first = statistics.median(each.first for each in turns[0] if each.times)
    later = [each.first for heard in turns[1:] for each in heard if each.times]
    yield {
        "chats": shape.concurrency,
        "turns": shape.turns,
        "cached_percent_of_shareable": 100 * shared / possible if possible else 0.0,
        "cached_percent_of_prompts": 100 * cached / num_prompt_tokens if num_prompt_tokens else 0.0,
        "first_turn_ttft_ms_p50": 1e3 * first,
        **times("later_ttft", later),
        "later_of_first": statistics.median(later) / first if later else 0.0,
        "failed": 0,
        **(await _beside_cold(client, bodies, turns[-1]) if shape.flush else {}),
    }


async def _beside_cold(
    client: Client, bodies: list[dict[str, Any]], warm: list[ResponseTiming]
) -> Figures:
    """Return times to first token with an empty prefix cache, and the earlier times for the same
    prompts.
    """
    await flush(client)
    heard = await asyncio.gather(*(client.stream(CHAT, each) for each in bodies))
    if failed := [each.error for each in heard if each.error]:
        return {"failed": len(failed), "why": failed[0]}
    cold, last = ([each.first for each in some if each.times] for some in (heard, warm))
    if not cold or not last:
        return {}
    share = statistics.median(last) / statistics.median(cold)
    return {**times("last_ttft", last), **times("last_cold_ttft", cold), "last_of_cold": share}


async def _tokens(client: Client, messages: list[dict[str, Any]]) -> list[int]:
    found: list[int] = (await client.fetch("/tokenize", {"messages": messages})).get("tokens", [])
    return found


def _common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
