"""Speed with automatic draft lengths and without drafts, by concurrent requests.

An oracle drafts tokens from a plain run and corrupts them with a set probability. Requests run
through the scheduler. Excludes the time to find drafts.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.evaluate.report.table import Table
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.speculative.config import SpeculativeConfig
from tilewright.runtime.speculative.ngram import NgramIndex

if TYPE_CHECKING:
    from tilewright.compiler.targets.interface.base import Executable

MIN_RATIO = 0.97
"""Lowest accepted ratio: the spread between plain runs is up to 3 %."""
_PROMPT, _ROUNDS = 16, 3


class OracleDrafts(NgramIndex):
    """Drafts from a known output. A token is wrong with probability 1 - ``rate``."""

    def __init__(self, output: Sequence[int], rate: float, seed: int) -> None:
        super().__init__((), longest=1, shortest=1)
        self._output, self._rate, self._generator = output, rate, random.Random(seed)
        self._length = 0

    def update(self, output: Sequence[int]) -> bool:
        """Set the number of output tokens."""
        self._length = len(output)
        return True

    def may_match_next(self) -> bool:
        """Return whether the next token has a draft."""
        return self._length < len(self._output)

    def propose(self, count: int) -> tuple[int, ...]:
        """Return up to ``count`` next tokens."""
        tokens = self._output[self._length : self._length + count]
        generator, rate = self._generator, self._rate
        return tuple(token if generator.random() < rate else token ^ 1 for token in tokens)


@dataclass(slots=True)
class _Speeds:
    """Tokens per second by run, and counters of the drafted runs."""

    plain: list[float] = field(default_factory=list)
    auto: list[float] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0


def measure_auto(
    executable: Executable,
    *,
    users: Sequence[int],
    rates: Sequence[float],
    num_drafts: int,
    num_tokens: int,
    keep: Callable[[Mapping[str, Any]], None],
) -> list[dict[str, Any]]:
    """Alternate runs without drafts and with automatic draft lengths. Return a record per load."""
    config = SpeculativeConfig(max_drafts=num_drafts)
    plain = _prepared_loop(executable, SchedulerConfig())
    auto = _prepared_loop(executable, SchedulerConfig(speculative=config))
    records = []
    for count in users:
        outputs = _run(plain, count, num_tokens)[0]
        for rate in rates:
            speeds = _Speeds()
            auto.scheduler.speculator.forget()  # the rates are different texts
            _run(auto, count, num_tokens, outputs=outputs, rate=rate)
            for _ in range(_ROUNDS):
                speeds.plain.append(_run(plain, count, num_tokens)[1])
                _, speed, requests = _run(auto, count, num_tokens, outputs=outputs, rate=rate)
                speeds.auto.append(speed)
                speeds.num_drafted += sum(request.num_draft_tokens for request in requests)
                speeds.num_accepted += sum(request.num_accepted_tokens for request in requests)
            records.append(_record(count, rate, speeds, _ROUNDS * count * num_tokens))
            keep(records[-1])
    return records


def _prepared_loop(executable: Executable, policy: SchedulerConfig) -> EngineLoop:
    """Return a loop after its warm-up."""
    loop = EngineLoop(executable, policy=policy)
    loop.warm_up()
    return loop


def _run(
    loop: EngineLoop,
    count: int,
    num_tokens: int,
    *,
    outputs: Sequence[Sequence[int]] = (),
    rate: float = 0.0,
) -> tuple[list[list[int]], float, list[RequestState]]:
    """Return the outputs, the tokens per second and the requests."""
    generator = random.Random(count)
    width = loop.executable.num_choosable
    params, requests = SamplingParams(max_tokens=num_tokens), []
    for number in range(count):
        prompt = tuple(generator.randrange(width) for _ in range(_PROMPT))
        request = RequestState(number, prompt, params, is_private=True)
        if outputs:
            request.ngrams = OracleDrafts(outputs[number], rate, number)
        requests.append(request)
    began = time.perf_counter()
    loop.generate(requests)
    seconds = time.perf_counter() - began
    return [request.output for request in requests], count * num_tokens / seconds, requests


def _record(count: int, rate: float, speeds: _Speeds, num_tokens: int) -> dict[str, Any]:
    drafted, accepted = speeds.num_drafted, speeds.num_accepted
    return {
        "figure": "auto",
        "users": count,
        "rate": rate,
        "plain_tokens_per_s": speeds.plain,
        "tokens_per_s": speeds.auto,
        "ratio": statistics.median(speeds.auto) / statistics.median(speeds.plain),
        "drafted_per_token": drafted / num_tokens,
        "acceptance": accepted / drafted if drafted else None,
    }


def show_auto(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return the records for the screen."""
    titles = ["users", "rate", "plain (tokens/s)", "auto (tokens/s)", "ratio"]
    titles += ["drafted tokens per token", "acceptance"]
    lines = []
    for record in records:
        plain, auto = (
            f"{min(record[key]):.0f}-{max(record[key]):.0f}"
            for key in ("plain_tokens_per_s", "tokens_per_s")
        )
        share = record["acceptance"]
        lines.append(
            [
                str(record["users"]),
                f"{record['rate']:g}",
                plain,
                auto,
                f"{record['ratio']:.3f}",
                f"{record['drafted_per_token']:.2f}",
                "-" if share is None else f"{share:.2f}",
            ]
        )
    return Table.of(
        titles,
        lines,
        f"{_ROUNDS} alternating rounds through the scheduler, greedy, after a round of warm-up.",
        f"A ratio below {MIN_RATIO} fails. Without batch invariance, outputs leave the oracle's.",
    )
