"""Figures of received responses: rates, and quantiles of latencies."""

from __future__ import annotations

import math
import statistics
from collections.abc import AsyncIterator, Sequence

from tilewright.errors import TilewrightError
from tilewright.evaluate.load.client import ResponseTiming

Figures = dict[str, float | str]

GOOD_FIRST, GOOD_TOKEN = 0.3, 0.025
"""Maximum seconds of a good answer: to the first token, and for a later token in the mean."""


async def rows_of(rows: AsyncIterator[Figures]) -> list[Figures]:
    """Return all rows of a scenario at its end."""
    return [row async for row in rows]


def summary(heard: Sequence[ResponseTiming], seconds: float) -> Figures:
    """Return the figures of answers within ``seconds``, defined as in vLLM's benchmark.

    Raises:
        TilewrightError: All requests failed.
    """
    good = [each for each in heard if not each.error]
    if not good:
        why = heard[0].error if heard else "there was none"
        raise TilewrightError(f"every request failed ({why})")
    failed = [each.error for each in heard if each.error]
    count = sum(each.count for each in good)
    spoke = [each for each in good if each.times]
    return {
        "failed": len(heard) - len(good),
        **({"why": failed[0]} if failed else {}),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": count / seconds,
        "chunks_per_second": sum(len(each.times) for each in good) / seconds,
        "output_tokens": count,
        **_goodput(spoke, seconds),
        **times("ttft", [each.first for each in spoke]),
        **times("itl", [gap for each in spoke for gap in each.gaps()]),
        **times("tpot", [each.per_token for each in spoke]),
    }


def _goodput(spoke: Sequence[ResponseTiming], seconds: float) -> Figures:
    """Return good answers per second, empty if no answer was streamed."""
    if all(len(each.times) < 2 for each in spoke):
        return {}
    good = sum(each.first <= GOOD_FIRST and each.per_token <= GOOD_TOKEN for each in spoke)
    return {"good_requests_per_second": good / seconds}


def times(name: str, seconds: Sequence[float]) -> Figures:
    """Return the median and the 99th percentile in milliseconds, empty without values."""
    if not seconds:
        return {}
    return {
        f"{name}_ms_p50": 1e3 * statistics.median(seconds),
        f"{name}_ms_p99": 1e3 * sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1],
    }
