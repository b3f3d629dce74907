"""Requests that come, are cancelled and go on in any order: the same ones for every executable."""

from __future__ import annotations

import random

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState


def random_operations(loop: EngineLoop, count: int, *, vocabulary: int = 60, seed: int = 5) -> int:
    """Make this many operations, then let all requests end. Returns how many answers ended."""
    rng, requests, ended = random.Random(seed), list[RequestState](), 0
    for number in range(count):
        kind = rng.random()
        if kind < 0.1:
            prompt = tuple(rng.choices(range(vocabulary), k=rng.randint(1, 24)))
            temperature = rng.choice((0.0, 1.0))
            sampling = SamplingParams(
                max_tokens=rng.randint(1, 40), temperature=temperature, seed=number
            )
            requests.append(RequestState(number, prompt, sampling))
            loop.add(requests[-1])
        elif kind < 0.13 and requests:
            loop.cancel(requests.pop(rng.randrange(len(requests))))
        elif loop.has_work():
            ended += _num_ended(loop.step())
            requests = [each for each in requests if each.finish_reason is None]
    while loop.has_work():
        ended += _num_ended(loop.step())
    return ended


def _num_ended(heard: list[RequestState]) -> int:
    return sum(each.finish_reason is not None for each in heard)
