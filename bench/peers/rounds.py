"""Several engines on the same weights in turn, A B A B: rates, their medians, ratios in pairs.

Knows engines only as workers that generate; what they are and how they start is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.peers.protocol import Generated, Loaded
from bench.peers.worker import Worker, WorkerError
from tilewright.compiler.bench import stats
from tilewright.compiler.bench.prompts import cut_prompts

_WARM_UP_TOKENS = 8

Report = Callable[[str, int, int], None]
"""Told ``(what, done, total)``."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure: a prompt of so many tokens, and so many generated.

    One generated token measures prefill, more of them decode (the first step does not count).
    """

    name: str
    prompt_length: int
    num_tokens: int

    def rate(self, generated: Generated) -> float:
        """Tokens a second."""
        times = generated.times
        if self.num_tokens == 1:
            return self.prompt_length / times[0]
        # as in `timing.figures`: the first decode step pays for what is set up once
        return (len(times) - 2) / (times[-1] - times[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``prefill_lengths`` and ``context`` in tokens of prompt; decode follows ``context``."""

    prefill_lengths: tuple[int, ...] = (128, 512)
    context: int = 128
    num_decoded: int = 128
    num_rounds: int = 5

    @property
    def measures(self) -> tuple[Measure, ...]:
        """What is measured in every round, in this order."""
        prefills = [Measure(f"prefill-{n}", n, 1) for n in self.prefill_lengths]
        return (*prefills, Measure(f"decode-{self.context}", self.context, self.num_decoded))

    @property
    def max_context(self) -> int:
        """Positions that an engine must have room for."""
        return max(measure.prompt_length + measure.num_tokens for measure in self.measures)

    def prompts(self, tokens: Sequence[int]) -> list[list[list[int]]]:
        """For the warm-up and every round, a prompt of its own for each measure, from a text."""
        per_round = len(self.measures)
        longest = max(measure.prompt_length for measure in self.measures)
        cut = cut_prompts(
            tokens, num_prompts=per_round * (self.num_rounds + 1), prompt_length=longest
        )
        bounds = range(0, len(cut) + 1, per_round)
        return [
            [
                prompt[: measure.prompt_length]
                for prompt, measure in zip(cut[low:high], self.measures, strict=True)
            ]
            for low, high in pairwise(bounds)
        ]


@dataclass(slots=True)
class Contestant:
    """An engine with its weights, and what came of it.

    ``start``: makes its worker, or raises WorkerError. ``rates``: by measure, one a round;
    ``failure``: why there are no (more) rates.
    """

    engine: str
    weights: str
    start: Callable[[], Worker]
    loaded: Loaded | None = None
    rates: dict[str, list[float]] = field(default_factory=dict)
    failure: str | None = None

    @property
    def name(self) -> str:
        """As it is printed."""
        return f"{self.engine} {self.weights}"

    def median(self, measure: str) -> float | None:
        """Tokens a second, None where nothing was measured."""
        rates = self.rates.get(measure)
        return stats.median(rates) if rates else None

    def spread(self, measure: str) -> float | None:
        """(max - min) / median, None below two rounds."""
        rates = self.rates.get(measure, [])
        return stats.spread(rates) if len(rates) > 1 else None


def measure_all(
    contestants: Sequence[Contestant],
    plan: Plan,
    *,
    tokens: Sequence[int],
    bandwidth: Callable[[], float],
    report: Report = lambda what, done, total: None,
) -> list[float]:
    """Start every contestant, warm it up, and measure all of them in turn; fills them in.

    One works at a time while the others are idle. The memory's read rate is taken before the first
    round and after each; returned in bytes a second. A contestant that fails is left out from
    then on.
    """
    warm_up, *rounds = plan.prompts(tokens)
    workers: dict[int, Worker] = {}
    rates = []
    try:
        for index, contestant in enumerate(contestants):
            report(f"load {contestant.name}", index, len(contestants))
            _load(contestant, workers, index, plan=plan, prompts=warm_up)
        rates.append(bandwidth())
        for number, prompts in enumerate(rounds):
            report(f"round {number + 1}", number, len(rounds))
            for measure, prompt in zip(plan.measures, prompts, strict=True):
                for index in list(workers):
                    _measure(contestants[index], workers, index, measure=measure, prompt=prompt)
            rates.append(bandwidth())
    finally:
        for worker in workers.values():
            worker.close()
    return rates


def _load(
    contestant: Contestant,
    workers: dict[int, Worker],
    index: int,
    *,
    plan: Plan,
    prompts: Sequence[Sequence[int]],
) -> None:
    try:
        worker = workers[index] = contestant.start()
        contestant.loaded = worker.loaded()
        for measure, prompt in zip(plan.measures, prompts, strict=True):
            worker.generate(prompt, min(_WARM_UP_TOKENS, measure.num_tokens))
        worker.settle()
    except WorkerError as error:
        _drop(contestant, workers, index, reason=str(error))


def _measure(
    contestant: Contestant,
    workers: dict[int, Worker],
    index: int,
    *,
    measure: Measure,
    prompt: Sequence[int],
) -> None:
    try:
        rate = measure.rate(workers[index].generate(prompt, measure.num_tokens))
        workers[index].settle()
    except WorkerError as error:
        _drop(contestant, workers, index, reason=str(error))
    except ZeroDivisionError:
        _drop(contestant, workers, index, reason="gave several tokens at one time")
    else:
        contestant.rates.setdefault(measure.name, []).append(rate)


def _drop(contestant: Contestant, workers: dict[int, Worker], index: int, *, reason: str) -> None:
    contestant.failure = reason
    worker = workers.pop(index, None)
    if worker is not None:
        worker.close()


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure of ours by a peer's, round by round: above 1 ours is faster."""

    measure: str
    repeats: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return stats.median(self.repeats)


def ratios(ours: Contestant, peer: Contestant, plan: Plan) -> list[Ratio]:
    """The ratios of the rounds that both have, for each measure that has one."""
    found = []
    for measure in plan.measures:
        both = zip(ours.rates.get(measure.name, []), peer.rates.get(measure.name, []), strict=False)
        repeats = tuple(mine / theirs for mine, theirs in both)
        if repeats:
            found.append(Ratio(measure.name, repeats))
    return found


def bandwidth_share(contestant: Contestant, plan: Plan, bandwidth: float) -> float | None:
    """How much of the memory's read rate decoding reaches by reading each weight once a token."""
    rate = contestant.median(plan.measures[-1].name)
    if rate is None or contestant.loaded is None or contestant.loaded.step_bytes is None:
        return None
    return contestant.loaded.step_bytes * rate / bandwidth


def contestant_record(contestant: Contestant, plan: Plan, bandwidth: float) -> dict[str, Any]:
    """A contestant as JSON values: sizes in bytes, rates in tokens a second, every repeat."""
    loaded = contestant.loaded
    return {
        "engine": contestant.engine,
        "weights": contestant.weights,
        "weight_bytes": loaded.weight_bytes if loaded else None,
        "step_bytes": loaded.step_bytes if loaded else None,
        "bandwidth_share": bandwidth_share(contestant, plan, bandwidth),
        "rates": {
            measure: {
                "median": contestant.median(measure),
                "spread": contestant.spread(measure),
                "repeats": repeats,
            }
            for measure, repeats in contestant.rates.items()
        },
        "failure": contestant.failure,
    }
