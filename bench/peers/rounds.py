"""Several engines on the same weights in turn, A B A B: rates, their medians, ratios in pairs.

Knows engines only as workers that generate; what they are and how they start is handed in. What
else keeps the cores busy meanwhile, where that is asked for, is started here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.peers.worker import Generated, Loaded, Worker, WorkerError
from tilewright.evaluate.cases.prompts import cut_prompts
from tilewright.evaluate.results import stats
from tilewright.utils.child_process import PYTHON, Child

_WARM_UP_TOKENS = 8
_SHARE_OF_TOGETHER = 4
"""Several users decode a fourth of one user's tokens each: their steps take longer."""
_SPINS = "while True: pass"
_SPINNING_SECONDS = 0.3

Report = Callable[[str, int, int], None]
"""Told ``(what, done, total)``."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One speed to measure: a prompt of so many tokens, and so many generated.

    One generated token measures prefill, more of them decode (the first step does not count), of
    ``num_users`` together, beside ``num_busy`` other processes that each keep a core busy.
    """

    name: str
    prompt_length: int
    num_tokens: int
    num_users: int = 1
    num_busy: int = 0

    def rate(self, generated: Generated) -> float:
        """The tokens a second that a continuation came to."""
        times = generated.times
        if self.num_tokens == 1:
            return self.prompt_length / times[0]
        # as in `timing.figures`: the first decode step pays for what is set up once
        return self.num_users * (len(times) - 2) / (times[-1] - times[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``prefill_lengths`` and ``context`` in tokens of prompt; decode follows ``context``, of one
    user, of each of ``users`` together, and of one user beside each of ``busy`` other processes.
    ``max_seconds``: no round is begun that would end behind these, as long as the longest before.
    """

    prefill_lengths: tuple[int, ...] = (128, 512)
    context: int = 128
    num_decoded: int = 128
    num_rounds: int = 5
    users: tuple[int, ...] = ()
    busy: tuple[int, ...] = ()
    max_seconds: float | None = None

    @property
    def measures(self) -> tuple[Measure, ...]:
        """What is measured in every round, in this order."""
        prefills = [Measure(f"prefill-{n}", n, 1) for n in self.prefill_lengths]
        length, decoded = self.context, self.num_decoded
        # three tokens are the least that a rate is made of
        each = max(3, decoded // _SHARE_OF_TOGETHER)
        together = [Measure(f"{self.decode}-x{n}", length, each, n) for n in self.users]
        beside = [Measure(f"{self.decode}-busy{n}", length, decoded, num_busy=n) for n in self.busy]
        return (*prefills, *together, Measure(self.decode, length, decoded), *beside)

    @property
    def decode(self) -> str:
        """The name of the measure of one user's decode with nothing beside it."""
        return f"decode-{self.context}"

    @property
    def max_users(self) -> int:
        """Sequences that an engine must have room for."""
        return max((1, *self.users))

    @property
    def max_context(self) -> int:
        """Positions that an engine must have room for."""
        return max(measure.prompt_length + measure.num_tokens for measure in self.measures)

    def prompts(self, tokens: Sequence[int]) -> list[list[list[int]]]:
        """Cut for the warm-up and every round a prompt of its own for each measure, from a text."""
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

    ``start``: makes its worker, or raises WorkerError. ``serves_many``: whether it is measured with
    several users. ``rates``: by measure, one a round; ``failure``: why there are no (more) rates.
    """

    engine: str
    weights: str
    start: Callable[[], Worker]
    loaded: Loaded | None = None
    rates: dict[str, list[float]] = field(default_factory=dict)
    failure: str | None = None
    worker: Worker | None = None
    serves_many: bool = True

    @property
    def name(self) -> str:
        """The engine and its weights, as they are printed."""
        return f"{self.engine} {self.weights}"

    def load(self, plan: Plan, prompts: Sequence[Sequence[int]]) -> None:
        """Start the worker and warm it up; a failure is kept."""
        with self._failing():
            self.worker = self.start()
            self.loaded = self.worker.loaded()
            for measure, prompt in zip(plan.measures, prompts, strict=True):
                self._generate(measure, prompt, min(_WARM_UP_TOKENS, measure.num_tokens))
            self.worker.settle()

    def measure(self, measure: Measure, prompt: Sequence[int]) -> None:
        """Measure a rate and keep it; does nothing where the engine has failed before."""
        if self.worker is None:
            return
        with self._failing():
            generated = self._generate(measure, prompt, measure.num_tokens)
            self.worker.settle()
            if generated is not None:
                self.rates.setdefault(measure.name, []).append(measure.rate(generated))

    def _generate(
        self, measure: Measure, prompt: Sequence[int], num_tokens: int
    ) -> Generated | None:
        """Generate, or give None where several users are asked of an engine that serves one."""
        assert self.worker is not None
        if measure.num_users == 1:
            return self.worker.generate(prompt, num_tokens)
        if not self.serves_many:
            return None
        return self.worker.generate(prompt, num_tokens, num_users=measure.num_users)

    def close(self) -> None:
        """End its worker, if it has one."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except WorkerError as error:
            self.failure = str(error)
        except ZeroDivisionError:
            self.failure = "gave several tokens at one time"
        if self.failure is not None:
            self.close()

    def record(self, plan: Plan, bandwidth: float) -> dict[str, Any]:
        """All figures as JSON values: sizes in bytes, rates in tokens a second, every repeat.

        ``bandwidth``: the memory's read rate, bytes a second; its share is what decoding reaches
        by reading each weight once a token.
        """
        rates = {
            measure: {
                "median": statistics.median(repeats),
                "spread": stats.spread(repeats) if len(repeats) > 1 else None,
                "repeats": repeats,
            }
            for measure, repeats in self.rates.items()
        }
        step_bytes = self.loaded.step_bytes if self.loaded else None
        decode = self.rates.get(plan.decode)
        share = (
            step_bytes * statistics.median(decode) / bandwidth if step_bytes and decode else None
        )
        return {
            "engine": self.engine,
            "weights": self.weights,
            "weight_bytes": self.loaded.weight_bytes if self.loaded else None,
            "step_bytes": step_bytes,
            "bandwidth_share": share,
            "rates": rates,
            "failure": self.failure,
        }


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
    round and after each; returned in bytes a second, so that there is one more than rounds. A
    contestant that fails is left out from then on.
    """
    warm_up, *rounds = plan.prompts(tokens)
    rates = []
    try:
        for index, contestant in enumerate(contestants):
            report(f"load {contestant.name}", index, len(contestants))
            contestant.load(plan, warm_up)
        rates.append(bandwidth())
        longest, began = 0.0, time.monotonic()
        for number, prompts in enumerate(rounds):
            started = time.monotonic()
            if plan.max_seconds and number and started - began + longest > plan.max_seconds:
                break
            report(f"round {number + 1}", number, len(rounds))
            for measure, prompt in zip(plan.measures, prompts, strict=True):
                with spinning(measure.num_busy):
                    for contestant in contestants:
                        contestant.measure(measure, prompt)
            rates.append(bandwidth())
            longest = max(longest, time.monotonic() - started)
    finally:
        for contestant in contestants:
            contestant.close()
    return rates


@contextmanager
def spinning(num_processes: int) -> Iterator[None]:
    """Keep so many other processes computing while the block runs, on whichever cores they get."""
    with ExitStack() as stack:
        for _ in range(num_processes):
            stack.enter_context(Child((*PYTHON, "-S", "-c", _SPINS), what="a busy process"))
        if num_processes:
            time.sleep(_SPINNING_SECONDS)
        yield


def ratios(ours: Contestant, peer: Contestant) -> dict[str, list[float]]:
    """Our rates / the peer's, by measure, of the rounds that both have; above 1 ours is faster."""
    return {
        measure: [mine / theirs for mine, theirs in zip(rates, peer.rates[measure], strict=False)]
        for measure, rates in ours.rates.items()
        if measure in peer.rates
    }
