"""Load test with constrained and free answers."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from tilewright.evaluate.load.client import CHAT, COMPLETIONS, Client, ResponseTiming, at_most
from tilewright.evaluate.load.figures import Figures
from tilewright.evaluate.load.shape import LoadConfig

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "number": {"type": "integer", "minimum": 0, "maximum": 99},
        "colours": {
            "type": "array",
            "items": {"enum": ["red", "green", "blue"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "number", "colours"],
    "additionalProperties": False,
}


async def schemas(client: Client, shape: LoadConfig) -> AsyncIterator[Figures]:
    """Send free streams only, then free streams and constrained streams in equal numbers.

    All constrained answers must match the schema.
    """
    half = max(1, shape.concurrency // 2)
    alone, _ = await at_most(2 * half, [_free(client, shape, n) for n in range(2 * half)])
    jobs = [_free(client, shape, n) for n in range(half)]
    jobs += [_bound(client, shape) for _ in range(half)]
    heard, _ = await at_most(2 * half, jobs)
    free, bound = heard[:half], heard[half:]
    failed = [each.error for each in (*alone, *heard) if each.error]
    if failed:
        yield {"failed": len(failed), "why": failed[0]}
        return
    before, beside = _mean(alone), _mean(free)
    yield {
        "users": 2 * half,
        "tpot_ms_free_alone": 1e3 * before,
        "tpot_ms_free_beside": 1e3 * beside,
        "loss_percent": 100 * (beside / before - 1),
        "answers_bound": len(bound),
        "failed": sum(not keeps(each.text) for each in bound),
    }


def keeps(text: str) -> bool:
    """Return whether an answer matches the scenario's schema."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    if not isinstance(found, dict) or set(found) != {"name", "number", "colours"}:
        return False
    name, number, colours = found["name"], found["number"], found["colours"]
    return (
        isinstance(name, str)
        and len(name) <= 12
        and type(number) is int
        and 0 <= number <= 99
        and isinstance(colours, list)
        and 1 <= len(colours) <= 3
        and set(colours) <= {"red", "green", "blue"}
    )


def _mean(heard: list[ResponseTiming]) -> float:
    return sum(each.per_token for each in heard) / len(heard)


def _free(
    client: Client, shape: LoadConfig, number: int
) -> Callable[[], Awaitable[ResponseTiming]]:
    body = shape.body(random.Random(shape.seed + number))
    return partial(client.stream, COMPLETIONS, body)


def _bound(client: Client, shape: LoadConfig) -> Callable[[], Awaitable[ResponseTiming]]:
    schema = {"name": "row", "schema": SCHEMA}
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Name something, with a number and colours."}],
        "max_tokens": max(128, shape.output_tokens),
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    return partial(client.stream, CHAT, body)
