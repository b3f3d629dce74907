"""Call traces with fixed random tokens, to compare and time engines."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A call: ``prefill`` with prompt ``lengths``, ``decode`` with ``steps``, or ``remove``."""

    method: str
    requests: tuple[int, ...]
    lengths: tuple[int, ...] = ()
    steps: int = 1

    @property
    def num_tokens(self) -> int:
        """Return the prompt tokens, or the tokens in all steps."""
        if self.method == "prefill":
            return sum(self.lengths)
        return self.steps * len(self.requests) if self.method == "decode" else 0


def _prefill(first: int, count: int, length: int) -> EngineCall:
    return EngineCall("prefill", tuple(range(first, first + count)), (length,) * count)


def _decode(requests: Sequence[int], steps: int) -> EngineCall:
    return EngineCall("decode", tuple(requests), steps=steps)


def cases(scale: int = 1) -> Mapping[str, tuple[EngineCall, ...]]:
    """Return the cases by name. Prompt lengths are divided by ``scale``."""
    return {
        "prefill 4 x 128": (_prefill(0, 4, 128 // scale),),
        "decode 8 x 32 + 16": (_prefill(0, 8, 32 // scale), _decode(range(8), 16 // scale)),
        "decode 8 x 128 + 16": (_prefill(0, 8, 128 // scale), _decode(range(8), 16 // scale)),
        "mixed": (
            _prefill(0, 4, 64 // scale),
            _decode((3, 1, 0, 2), 2),
            _prefill(4, 2, 128 // scale),
            _decode(range(6), 6),
            EngineCall("remove", (1, 3)),
            _prefill(6, 4, 32 // scale),
            _decode((0, 2, 4, 5, 6, 7, 8, 9), 8),
            _decode((9, 8, 7, 6, 5, 4, 2, 0), 8),
            EngineCall("remove", (0, 2, 4, 5, 6, 7, 8, 9)),
        ),
    }


class EngineTrace:
    """A case with its tokens on a device, created before timing."""

    def __init__(self, calls: Sequence[EngineCall], vocab_size: int, device: str) -> None:
        chosen = random.Random(0)

        def tokens(count: int) -> Tensor:
            return torch.tensor([chosen.randrange(vocab_size) for _ in range(count)]).to(device)

        self._calls: list[tuple[str, list[Any]]] = []
        self.num_tokens = sum(call.num_tokens for call in calls)
        self.requests = sorted({request for call in calls for request in call.requests})
        for call in calls:
            ids = list(call.requests)
            for _ in range(call.steps):
                given: list[Any] = [ids]
                if call.method == "prefill":
                    given.append([tokens(length) for length in call.lengths])
                elif call.method == "decode":
                    given.append(tokens(len(ids)))
                self._calls.append((call.method, given))

    def run(self, engine: Any) -> list[Tensor]:
        """Return all logits in call order."""
        found = (getattr(engine, method)(*given) for method, given in self._calls)
        return [logits for logits in found if logits is not None]

    def seconds(self, engine: Any, wait: Callable[[], object]) -> float:
        """Return the seconds for all calls. ``wait`` returns after the device's last work."""
        wait()
        begun = time.perf_counter()
        self.run(engine)
        wait()
        return time.perf_counter() - begun
